"""The backend named ``server``: publishing and control through a running server's HTTP API.

For a process that cannot reach the store itself, as when the memory backend lives in the server.
"""

from taskqueue_remote.backend import RemoteBackend, create_backend

__all__ = ["RemoteBackend", "create_backend"]
