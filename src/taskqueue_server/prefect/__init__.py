"""WebSockets and HTTP operations for Prefect's task workers.

Prefect itself is not imported: its frames are plain JSON. ``docs/prefect.md`` describes the guarantees.
"""

from taskqueue_server.prefect.socket import OPERATIONS, SOCKETS

__all__ = ["OPERATIONS", "SOCKETS"]
