"""What is noted of each HTTP request and of each socket that is refused: one line of the log, and the metrics."""

from __future__ import annotations

import logging
import time

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskqueue_core.protocol.frames import (
    CLOSE_CLEAN,
    CLOSE_PROTOCOL,
    CLOSE_RESTART,
    CLOSE_UNAUTHENTICATED,
)
from taskqueue_server.auth.access import OPEN
from taskqueue_server.metrics.exporter import Metrics
from taskqueue_server.metrics.process_metrics import OTHER, Local
from taskqueue_server.routing.operations import Operation, RequestContext
from taskqueue_server.routing.operations import Scope as TokenScope

_QUIET = {"/alive", "/health", "/ready", "/metrics"}
"""asked for all the time, by programs"""
_ALARMING = {401, 403, 421}
_ALARMING_ENDS = {CLOSE_PROTOCOL, CLOSE_UNAUTHENTICATED}
_UNREMARKABLE_ENDS = {CLOSE_CLEAN, 1001, CLOSE_RESTART}
_DISCONNECTED = 499
"""the status of a request that its sender gave up, as others write it"""
_FAILED = 500
_log = logging.getLogger("taskqueue.access")


class RequestLogMiddleware:
    """Middleware, the outermost. What came is never noted as it came: paths are those of the table of operations."""

    def __init__(self, app: ASGIApp, local: Local) -> None:
        self._app = app
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, and note how it went."""
        if scope["type"] == "http":
            await self._request(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, start = _DISCONNECTED, time.perf_counter()

        async def heard(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, heard)
        except Exception:
            if status == _DISCONNECTED:
                status = _FAILED  # which is answered farther out
            raise
        finally:
            seconds = time.perf_counter() - start
            result = scope.get("taskqueue.operation")
            method, path = (OTHER, OTHER) if result is None else (result.method, result.address)
            self._local.request(method, path, status, seconds)
            level = _level(status, path)
            if _log.isEnabledFor(level):
                fields = {"method": method, "path": path, "status": status}
                fields["seconds"] = round(seconds, 6)
                _log.log(level, "request", extra={**fields, **_log_fields(scope)})

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def heard(message: Message) -> None:
            if message["type"] == "websocket.http.response.start":
                code = message["status"]
                self._local.socket_ended(code)
                _log.warning("socket refused", extra={"status": code, **_log_fields(scope)})
            elif message["type"] == "websocket.close":
                code = message.get("code", CLOSE_CLEAN)
                self._local.socket_ended(code)
                if code not in _UNREMARKABLE_ENDS:
                    level = logging.WARNING if code in _ALARMING_ENDS else logging.INFO
                    _log.log(level, "socket closed", extra={"code": code, **_log_fields(scope)})
            await send(message)

        await self._app(scope, receive, heard)


def _level(status: int, path: str) -> int:
    if status >= 500 or status in _ALARMING:  # noqa: PLR2004 - where the errors of servers begin
        return logging.WARNING
    return logging.DEBUG if path in _QUIET else logging.INFO


def _log_fields(scope: Scope) -> dict[str, str]:
    peer, identity = scope.get("client"), scope.get("taskqueue.identity")
    fields = {} if peer is None else {"peer": peer[0]}
    return fields if identity is None else {**fields, "identity": identity}


async def metrics(call: RequestContext) -> Response:
    """Return metrics as Prometheus' text, or as OpenMetrics where that is asked for."""
    known: Metrics = call.request.app.state.metrics
    accept = call.request.headers.get("accept", "")
    text, media_type = await known.render(call.identity or OPEN, accept)
    return Response(text, headers={"content-type": media_type})


OPERATIONS = (
    Operation(
        id="operation_metrics",
        method="GET",
        path="/metrics",
        handler=metrics,
        verb="admin",
        scope=TokenScope.HANDLER,
        answers={200: str},
    ),
)
