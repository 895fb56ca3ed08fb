"""The server: ``serve`` runs it as ``taskqueue serve`` does; ``create_app`` returns only its ASGI application."""

from taskqueue_core.loading import needs_extra

with needs_extra("server"):
    from taskqueue_server.app import create_app
    from taskqueue_server.process.serve import ServerProcess, serve

__all__ = ["ServerProcess", "create_app", "serve"]
