"""The server: ``taskqueue serve``, or ``create_app`` for a server program of one's own."""

from taskqueue_core.server.app import create_app
from taskqueue_core.server.running.serve import Server, serve

__all__ = ["Server", "create_app", "serve"]
