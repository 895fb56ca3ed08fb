"""A memory backend on a clock that stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from taskqueue_core.clock import ManualClock
from taskqueue_memory import MemoryBackend


@pytest.fixture
def clock() -> ManualClock:
    """The backend's time."""
    return ManualClock()


@pytest_asyncio.fixture
async def backend(clock: ManualClock) -> AsyncIterator[MemoryBackend]:
    """An empty backend, closed after the test; its books must balance."""
    backend = MemoryBackend(clock=clock)
    yield backend
    for key in await backend.control.queues():
        ledger = await backend.control.ledger(key)
        assert ledger.balanced, f"{key}: {ledger}"
    await backend.aclose()
