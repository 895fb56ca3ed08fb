"""The application, for any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import WebSocketRoute

from taskqueue_core.backend import Backend
from taskqueue_core.config import Settings
from taskqueue_core.consumer.maintenance import keep_house
from taskqueue_server import dashboard, prefect
from taskqueue_server.api.table import OPERATIONS, Description
from taskqueue_server.context.server import Hub
from taskqueue_server.metrics import http
from taskqueue_server.metrics.exporter import Metrics
from taskqueue_server.metrics.http import Noted
from taskqueue_server.problems import problem_response
from taskqueue_server.routing.extensions import Part, check_parts
from taskqueue_server.routing.host_check import Guard
from taskqueue_server.routing.operations import routes
from taskqueue_server.worker_socket.endpoint import socket

__all__ = ["create_app"]


_OWN = (*OPERATIONS, *http.OPERATIONS, *dashboard.OPERATIONS, *prefect.OPERATIONS)


def create_app(backend: Backend, settings: Settings, parts: Sequence[Part] = ()) -> Starlette:
    """Make the server's application, with what ``parts`` bring. It owns ``backend`` and closes it in the end.

    The lifespan keeps house and drains. Raises `CapabilityMissing` if the backend lacks ``control`` or
    ``dead_letters``, or what a part needs, and `ConfigurationError` for a tokens file that is no good, and for parts
    that do not go together. Which parts ``settings`` name is for who calls to look at: see `load_parts`.
    """
    check_parts(_OWN, parts)
    hub = Hub(backend, settings)
    metrics = Metrics(hub)
    opened = [(part.name, part.open(hub)) for part in parts]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        chores = (
            asyncio.create_task(keep_house(hub.control)),
            asyncio.create_task(hub.access.watch()),
            asyncio.create_task(metrics.keep()),
        )
        try:
            async with AsyncExitStack() as stack:
                for name, context in opened:
                    hub.brought[name] = await stack.enter_async_context(context)
                hub.started = True
                yield
                await hub.drain()
        except Exception as error:
            hub.fault = error
            raise
        finally:
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            await hub.backend.aclose()

    app = Starlette(
        routes=[
            *routes(OPERATIONS),
            *routes(http.OPERATIONS),
            *(route for part in parts for route in routes(part.operations)),
            *dashboard.ROUTES,
            WebSocketRoute("/v1/socket", socket),
            *routes(prefect.OPERATIONS),
            *prefect.SOCKETS,
            *(route for part in parts for route in dashboard.page_routes(part)),
        ],
        middleware=[Middleware(Noted, local=metrics.local), Middleware(Guard, hub=hub)],
        exception_handlers={HTTPException: problem_response, Exception: problem_response},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.hub = hub
    app.state.metrics = metrics
    app.state.description = Description(parts)
    app.state.links = tuple(link for part in parts for link in part.links)
    return app
