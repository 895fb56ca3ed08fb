"""The HTTP API without a network: requests go straight into the application."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from taskqueue_core.server import create_app
from taskqueue_memory import MemoryBackend
from tests.server.support import settings


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
