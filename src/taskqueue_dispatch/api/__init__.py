"""The dispatcher over HTTP: what it brings into the server."""

from taskqueue_dispatch.api.extension import part

__all__ = ["part"]
