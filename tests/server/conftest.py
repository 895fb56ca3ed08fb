"""Fixtures for the HTTP API without a network: requests go straight to the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from taskqueue_memory import MemoryBackend
from tests.clock import pytest_asyncio_loop_factories
from tests.server.support import app_client

__all__ = ["pytest_asyncio_loop_factories"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the test file with the slowest imports, unless long tests are requested."""
    long = "not long" not in config.option.markexpr
    return None if long or collection_path.name != "test_schema.py" else True


@pytest.fixture
def backend() -> MemoryBackend:
    """The memory backend behind the API."""
    return MemoryBackend()


@pytest.fixture
async def api(backend: MemoryBackend) -> AsyncIterator[httpx2.AsyncClient]:
    """An HTTP client of a running application."""
    async with app_client(backend) as client:
        yield client
