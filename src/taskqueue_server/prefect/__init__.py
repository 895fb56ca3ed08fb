"""WebSockets and HTTP operations for the task workers of Prefect.

Prefect itself is not imported, because its frames are JSON. ``docs/prefect.md`` describes the guarantees.
"""

from starlette.routing import WebSocketRoute

from taskqueue_server.prefect import socket as _socket
from taskqueue_server.prefect.socket import OPERATIONS

__all__ = ["OPERATIONS", "SOCKETS"]

SOCKETS = (
    WebSocketRoute(_socket.PATH, _socket.socket),
    WebSocketRoute(_socket.EVENTS_PATH, _socket.events_socket),
)
