"""The socket that task workers of Prefect speak, and the few requests that they make beside it.

Nothing of Prefect is needed here: what goes over the wire is JSON. What is promised stands in ``docs/prefect.md``.
"""

from starlette.routing import WebSocketRoute

from taskqueue_core.server.prefect import events, socket
from taskqueue_core.server.prefect.requests import OPERATIONS

__all__ = ["OPERATIONS", "SOCKETS"]

SOCKETS = (
    WebSocketRoute(socket.PATH, socket.socket),
    WebSocketRoute(events.PATH, events.socket),
)
