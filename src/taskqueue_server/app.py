"""Build the ASGI application of the server."""

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
from taskqueue_core.consumer.maintenance import run_maintenance
from taskqueue_server import dashboard, prefect
from taskqueue_server.api.table import OPERATIONS, api_describer
from taskqueue_server.context.server import ServerContext
from taskqueue_server.dashboard.history import HistoryRecorder
from taskqueue_server.dashboard.local_metrics import TenantFlows
from taskqueue_server.logs import limit_lines
from taskqueue_server.metrics import http
from taskqueue_server.metrics.exporter import Metrics
from taskqueue_server.metrics.http import ServerMiddleware
from taskqueue_server.metrics.process_metrics import FINE_BOUNDS
from taskqueue_server.problems import problem_response
from taskqueue_server.routing.extensions import Extension, check_extensions
from taskqueue_server.routing.operations import routes
from taskqueue_server.worker_socket.admission import socket

_OWN = (*OPERATIONS, *http.OPERATIONS, *dashboard.OPERATIONS, *prefect.OPERATIONS)


def create_app(
    backend: Backend, settings: Settings, extensions: Sequence[Extension] = ()
) -> Starlette:
    """Create the server's ASGI application, which owns ``backend`` and has only the given extensions.

    While the application serves, it runs maintenance periodically. At shutdown it drains the connections and closes
    ``backend``. `load_extensions` returns the extensions that the settings name.

    Raises `CapabilityMissing` if the backend lacks ``control``, ``dead_letters`` or a capability that an extension
    needs. Raises `ConfigurationError` if the tokens file is invalid, or if `check_extensions` refuses the extensions.
    """
    check_extensions(_OWN, extensions)
    context = ServerContext(backend, settings)
    metrics = Metrics(context)
    history = HistoryRecorder(context.statistics, metrics.local.run_times, FINE_BOUNDS)
    tenants = TenantFlows(context.backend.now)
    context.hooks.register(tenants)
    opened = [(extension.name, extension.open(context)) for extension in extensions]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        chores = (
            asyncio.create_task(run_maintenance(context.backend)),
            asyncio.create_task(context.access.watch()),
            asyncio.create_task(metrics.share()),
            asyncio.create_task(history.run()),
            asyncio.create_task(limit_lines(authenticates=context.access.authenticates)),
        )
        try:
            async with AsyncExitStack() as stack:
                for name, entering in opened:
                    context.extension_state[name] = await stack.enter_async_context(entering)
                context.started = True
                yield
                await context.drain()
        except Exception as error:
            context.startup_error = error
            raise
        finally:
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            context.hooks.unregister(tenants)
            await context.backend.aclose()

    app = Starlette(
        routes=[
            *routes(OPERATIONS),
            *routes(http.OPERATIONS),
            *(route for extension in extensions for route in routes(extension.operations)),
            *dashboard.ROUTES,
            WebSocketRoute("/v1/socket", socket),
            *routes(prefect.OPERATIONS),
            *prefect.SOCKETS,
            *(route for extension in extensions for route in dashboard.page_routes(extension)),
        ],
        middleware=[Middleware(ServerMiddleware, context=context, local=metrics.local)],
        exception_handlers={HTTPException: problem_response, Exception: problem_response},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.context = context
    app.state.metrics = metrics
    app.state.history = history
    app.state.tenants = tenants
    app.state.describe_api = api_describer(extensions)
    app.state.links = tuple(link for extension in extensions for link in extension.links)
    return app
