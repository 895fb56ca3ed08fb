"""A scripted server for the worker's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.worker.fake import FakeServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    """Return a listening server."""
    fake = FakeServer()
    await fake.start()
    try:
        yield fake
    finally:
        await fake.close()
