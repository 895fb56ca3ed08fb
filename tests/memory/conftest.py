"""Fixtures for the memory backend tests: a manual clock, and a backend that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from taskqueue_core.clock import ManualClock
from taskqueue_memory import MemoryBackend


@pytest.fixture
def clock() -> ManualClock:
    """A manual clock that gives the backend its time."""
    return ManualClock()


@pytest_asyncio.fixture
async def backend(clock: ManualClock) -> AsyncIterator[MemoryBackend]:
    """An empty backend; after the test, the ledger of each queue must balance, and the backend is closed."""
    backend = MemoryBackend(clock=clock)
    yield backend
    for key in await backend.control.queues():
        ledger = await backend.control.ledger(key)
        assert ledger.balanced, f"{key}: {ledger}"
    await backend.aclose()
