"""The server: ``taskqueue serve``, or ``create_app`` for a server program of one's own."""

from taskqueue_server.app import create_app
from taskqueue_server.process.serve import Server, serve

__all__ = ["Server", "create_app", "serve"]
