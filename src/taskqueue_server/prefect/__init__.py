"""WebSockets and HTTP operations for the task workers of Prefect.

Prefect itself is not imported, because its frames are JSON. ``docs/prefect.md`` describes the guarantees.
"""

from taskqueue_server.prefect.socket import OPERATIONS, SOCKETS

__all__ = ["OPERATIONS", "SOCKETS"]
