"""The socket that task workers of Prefect speak, and the few requests that they make beside it.

Nothing of Prefect is needed here: what goes over the wire is JSON. What is promised stands in ``docs/prefect.md``.
"""

from starlette.routing import WebSocketRoute

from taskqueue_server.prefect import socket as _socket
from taskqueue_server.prefect.socket import OPERATIONS

__all__ = ["OPERATIONS", "SOCKETS"]

SOCKETS = (
    WebSocketRoute(_socket.PATH, _socket.socket),
    WebSocketRoute(_socket.EVENTS_PATH, _socket.events_socket),
)
