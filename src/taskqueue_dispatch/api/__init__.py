"""The dispatcher's extension of the server: HTTP operations and a dashboard page."""

from taskqueue_dispatch.api.extension import extension

__all__ = ["extension"]
