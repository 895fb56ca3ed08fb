"""The backend named ``server``: publishing and control through a running server's HTTP API.

It is meant for processes that cannot reach the store, for example because the server uses the memory backend.
"""

from taskqueue_core.loading import needs_extra

with needs_extra("client"):
    from taskqueue_remote.backend import RemoteBackend, create_backend

__all__ = ["RemoteBackend", "create_backend"]
