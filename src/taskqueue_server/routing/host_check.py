"""The door of the HTTP API: names that the server answers to, no pages of other sites; answers tell the time."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskqueue_server.auth.origins import host_problem, is_allowed_origin
from taskqueue_server.context.server import ServerContext
from taskqueue_server.problems import ProblemError, respond

TIME_HEADER = "taskqueue-time"


class HostCheckMiddleware:
    """Middleware. Sockets pass: they have rules of their own."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                headers[TIME_HEADER] = repr(self._context.backend.now())
                headers["x-content-type-options"] = "nosniff"
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = _refusal(self._context, Headers(scope=scope), scope["scheme"])
        app = self._app if refusal is None else respond(refusal)
        await app(scope, receive, stamped)


def _refusal(context: ServerContext, headers: Headers, scheme: str) -> ProblemError | None:
    settings = context.settings
    if wrong := host_problem(headers, settings.allowed_hosts, loopback=not context.authenticates):
        return ProblemError(421, "wrong_host", wrong)
    if not is_allowed_origin(headers, scheme, settings.origins):
        return ProblemError(403, "origin", "cross-site request rejected")
    return None
