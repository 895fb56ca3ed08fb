"""A scripted server for the tests of workers. Tests with the mark ``fast_clock`` do not wait in real time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.clock import pytest_asyncio_loop_factories
from tests.worker.fake import FakeServer

__all__ = ["pytest_asyncio_loop_factories", "server"]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    """Return a server that is listening."""
    fake = FakeServer()
    await fake.start()
    try:
        yield fake
    finally:
        await fake.close()
