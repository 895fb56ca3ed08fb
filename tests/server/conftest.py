"""The HTTP API without a network: requests go straight into the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from taskqueue_core.server import create_app
from taskqueue_memory import MemoryBackend
from tests.clock import pytest_asyncio_loop_factories
from tests.server.support import settings

__all__ = ["pytest_asyncio_loop_factories"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over, where no long test is wanted, the file whose imports take longer than all others together."""
    long = "not long" not in config.option.markexpr
    return None if long or collection_path.name != "test_schema.py" else True


@pytest.fixture
def backend() -> MemoryBackend:
    """The store behind the API."""
    return MemoryBackend()


@pytest.fixture
async def api(backend: MemoryBackend) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a running application."""
    app = create_app(backend, settings())
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8420") as client,
    ):
        yield client
