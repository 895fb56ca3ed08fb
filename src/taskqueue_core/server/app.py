"""The application, for any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import WebSocketRoute

from taskqueue_core.backend import Backend
from taskqueue_core.config import Settings
from taskqueue_core.consuming.housekeeping import keep_house
from taskqueue_core.server import dashboard, prefect
from taskqueue_core.server.access.guard import Guard
from taskqueue_core.server.api.operations import routes
from taskqueue_core.server.api.problems import problem_response
from taskqueue_core.server.api.table import OPERATIONS
from taskqueue_core.server.hub import Hub
from taskqueue_core.server.metrics import operation as scraping
from taskqueue_core.server.metrics.observer import Metrics
from taskqueue_core.server.metrics.requests import Noted
from taskqueue_core.server.sockets.socket import socket

__all__ = ["create_app"]


def create_app(backend: Backend, settings: Settings) -> Starlette:
    """Make the server's application. It owns ``backend`` and closes it in the end.

    The lifespan keeps house and drains. Raises `CapabilityMissing` if the backend lacks ``control`` or
    ``dead_letters``, and `ConfigurationError` for a tokens file that is no good.
    """
    hub = Hub(backend, settings)
    metrics = Metrics(hub)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        chores = (
            asyncio.create_task(keep_house(hub.control)),
            asyncio.create_task(hub.access.watch()),
            asyncio.create_task(metrics.keep()),
        )
        hub.started = True
        try:
            yield
            await hub.drain()
        finally:
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            await hub.backend.aclose()

    app = Starlette(
        routes=[
            *routes(OPERATIONS),
            *routes(scraping.OPERATIONS),
            *dashboard.ROUTES,
            WebSocketRoute("/v1/socket", socket),
            *routes(prefect.OPERATIONS),
            *prefect.SOCKETS,
        ],
        middleware=[Middleware(Noted, local=metrics.local), Middleware(Guard, hub=hub)],
        exception_handlers={HTTPException: problem_response, Exception: problem_response},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.hub = hub
    app.state.metrics = metrics
    return app
