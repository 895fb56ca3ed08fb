"""The application without a network, and a client that asks as a browser without scripts does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
import pytest_asyncio
from playwright.async_api import Browser

from taskqueue_memory import MemoryBackend
from taskqueue_server import create_app
from taskqueue_server.dashboard import poller
from tests.clock import pytest_asyncio_loop_factories
from tests.dashboard.support import PAGE, browsing
from tests.server.support import Running, settings

__all__ = ["pytest_asyncio_loop_factories"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are taken five times a second, that nobody waits for the next one for long."""
    monkeypatch.setattr(poller, "_SECOND", 0.2)


@pytest.fixture
async def it() -> AsyncIterator[Running]:
    """A started application without authentication."""
    backend = MemoryBackend()
    app = create_app(backend, settings())
    async with app.router.lifespan_context(app):
        server = SimpleNamespace(context=app.state.context, url="http://127.0.0.1:8420", app=app)
        yield Running(cast("Any", server), backend)


@pytest.fixture
async def client(it: Running) -> AsyncIterator[httpx2.AsyncClient]:
    """Follows no redirects: each is looked at."""
    transport = httpx2.ASGITransport(app=cast("Any", it.server).app)
    async with httpx2.AsyncClient(
        transport=transport, base_url=it.server.url, headers=PAGE
    ) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One browser for the tests of a file, which takes its time to start; each test has a profile of its own."""
    async with browsing() as browser:
        yield browser
