"""An application without a network, and an HTTP client that requests pages as a browser without scripts does."""

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
    """Take samples five times per second, so that tests do not wait long for the next one."""
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
    """An HTTP client that does not follow redirects, so that tests can check them."""
    transport = httpx2.ASGITransport(app=cast("Any", it.server).app)
    async with httpx2.AsyncClient(
        transport=transport, base_url=it.server.url, headers=PAGE
    ) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One browser for all tests of a file, because its start is slow; each test has its own profile."""
    async with browsing() as browser:
        yield browser
