"""The application, for any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import WebSocketRoute

from taskqueue_core.backend import Backend
from taskqueue_core.config import Settings
from taskqueue_core.consuming.housekeeping import keep_house
from taskqueue_core.server import dashboard, prefect
from taskqueue_core.server.access.guard import Guard
from taskqueue_core.server.api import batch as http_batch
from taskqueue_core.server.api import dead_letters as http_dead_letters
from taskqueue_core.server.api import lookups as http_lookups
from taskqueue_core.server.api import migration as http_migration
from taskqueue_core.server.api import queues as http_queues
from taskqueue_core.server.api import scaling as http_scaling
from taskqueue_core.server.api import settings as http_settings
from taskqueue_core.server.api import system as http_system
from taskqueue_core.server.api import tasks as http_tasks
from taskqueue_core.server.api.openapi import document
from taskqueue_core.server.api.operations import Call, Operation, answer, routes
from taskqueue_core.server.api.problems import problem_response
from taskqueue_core.server.hub import VERSION, Hub
from taskqueue_core.server.metrics import operation as http_metrics
from taskqueue_core.server.metrics.observer import Metrics
from taskqueue_core.server.metrics.requests import Noted
from taskqueue_core.server.sockets import asyncapi
from taskqueue_core.server.sockets.socket import socket

__all__ = ["OPERATIONS", "create_app"]


async def describe(call: Call) -> Response:
    """Return this description."""
    return answer(_described(open_to_all=not call.hub.authenticates))


@cache
def _described(*, open_to_all: bool) -> dict[str, Any]:
    return document(OPERATIONS, VERSION, open_to_all=open_to_all)


async def describe_socket(_: Call) -> Response:
    """Return the description of the workers' socket, as AsyncAPI 3.1."""
    return answer(_socket_described())


@cache
def _socket_described() -> dict[str, Any]:
    return asyncapi.document(VERSION)


OPERATIONS = (
    *http_batch.OPERATIONS,
    *http_tasks.OPERATIONS,
    *http_lookups.OPERATIONS,
    *http_queues.OPERATIONS,
    *http_settings.OPERATIONS,
    *http_dead_letters.OPERATIONS,
    *http_system.OPERATIONS,
    *http_migration.OPERATIONS,
    *http_scaling.OPERATIONS,
    Operation(
        method="GET", path="/v1/openapi.json", handler=describe, answers={200: dict[str, Any]}
    ),
    Operation(
        method="GET",
        path="/v1/asyncapi.json",
        handler=describe_socket,
        answers={200: dict[str, Any]},
    ),
)


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
            *routes(http_metrics.OPERATIONS),
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
