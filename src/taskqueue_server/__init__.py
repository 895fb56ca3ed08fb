"""The server: ``taskqueue serve``, or ``create_app`` for a server program of your own."""

from taskqueue_server.app import create_app
from taskqueue_server.process.serve import ServerProcess, serve

__all__ = ["ServerProcess", "create_app", "serve"]
