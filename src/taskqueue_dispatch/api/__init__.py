"""The dispatcher over HTTP: what it brings into the server."""

from taskqueue_dispatch.api.extension import extension

__all__ = ["extension"]
