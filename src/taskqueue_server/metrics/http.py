"""The operation ``/metrics``, and the server's middleware, which logs and counts requests and sockets."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskqueue_core.protocol import frames
from taskqueue_server.auth.access import OBSERVING, OPEN
from taskqueue_server.auth.credentials import mark_authenticated, name_client
from taskqueue_server.auth.origins import refusal
from taskqueue_server.context.server import ServerContext
from taskqueue_server.metrics.exporter import Metrics
from taskqueue_server.metrics.process_metrics import OTHER, ProcessMetrics
from taskqueue_server.problems import respond
from taskqueue_server.routing.operations import Operation, RequestContext
from taskqueue_server.routing.operations import Scope as TokenScope

_QUIET = {"/alive", "/health", "/ready", "/metrics"}
"""paths that monitoring polls frequently, so their requests are logged at DEBUG unless they fail"""
_ALARMING = {401, 403, 421}
_ALARMING_ENDS = {frames.CLOSE_PROTOCOL, frames.CLOSE_UNAUTHENTICATED}
_UNREMARKABLE_ENDS = {frames.CLOSE_CLEAN, 1001, frames.CLOSE_RESTART}
_DISCONNECTED = 499
"""status that is logged for a request that the client aborted, as in nginx"""
_FAILED = 500
TIME_HEADER = "taskqueue-time"
_log = logging.getLogger("taskqueue.access")


class ServerMiddleware:
    """Middleware that logs and counts requests and sockets. It also checks the host and origin of requests.

    Logs and metrics name the path of the operation, such as ``/v1/queues/{key}``, never the path that was requested.
    """

    def __init__(self, app: ASGIApp, context: ServerContext, local: ProcessMetrics) -> None:
        self._app = app
        self._context = context
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request or a socket, and record its outcome."""
        if scope["type"] in {"http", "websocket"}:
            lift = name_client if self._context.access.authenticates else mark_authenticated
            lift(scope)
        if scope["type"] == "http":
            await self._request(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, start = _DISCONNECTED, time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers[TIME_HEADER] = repr(self._context.backend.now())
                headers["x-content-type-options"] = "nosniff"
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            refused = refusal(
                Headers(scope=scope),
                scope["scheme"],
                self._context.settings,
                loopback=not self._context.access.authenticates,
            )
            app = self._app if refused is None else respond(refused)
            await app(scope, receive, send_with_headers)
        except Exception:
            if status == _DISCONNECTED:
                status = _FAILED  # Starlette's outermost handler responds with `_FAILED`
            raise
        finally:
            self._record_request(scope, status, time.perf_counter() - start)

    def _record_request(self, scope: Scope, status: int, seconds: float) -> None:
        operation = scope.get("taskqueue.operation")
        method, path = (
            (OTHER, OTHER) if operation is None else (operation.method, operation.address)
        )
        self._local.request(method, path, status, seconds)
        if status >= _FAILED or status in _ALARMING:
            level = logging.WARNING
        else:
            level = logging.DEBUG if path in _QUIET else logging.INFO
        if _log.isEnabledFor(level):
            fields = {"method": method, "path": path, "status": status}
            fields["seconds"] = round(seconds, 6)
            _log.log(level, "request", extra={**fields, **_log_fields(scope)})

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_record(message: Message) -> None:
            if message["type"] == "websocket.http.response.start":
                code = message["status"]
                self._local.socket_ended(code)
                _log.warning("socket refused", extra={"status": code, **_log_fields(scope)})
            elif message["type"] == "websocket.close":
                code = message.get("code", frames.CLOSE_CLEAN)
                self._local.socket_ended(code)
                if code not in _UNREMARKABLE_ENDS:
                    level = logging.WARNING if code in _ALARMING_ENDS else logging.INFO
                    _log.log(level, "socket closed", extra={"code": code, **_log_fields(scope)})
            await send(message)

        await self._app(scope, receive, send_and_record)


def _log_fields(scope: Scope) -> dict[str, str]:
    peer, identity = scope.get("client"), scope.get("taskqueue.identity")
    fields = {} if peer is None else {"peer": peer[0]}
    return fields if identity is None else {**fields, "identity": identity}


async def metrics(call: RequestContext) -> Response:
    """Return metrics in Prometheus' text format, or in OpenMetrics format if the client accepts it."""
    known: Metrics = call.request.app.state.metrics
    accept = call.request.headers.get("accept", "")
    text, media_type = await known.render(call.identity or OPEN, accept)
    return Response(text, headers={"content-type": media_type})


OPERATIONS = (
    Operation(
        "GET",
        "/metrics",
        metrics,
        {200: str},
        id="operation_metrics",
        verb=OBSERVING,
        scope=TokenScope.HANDLER,
    ),
)
