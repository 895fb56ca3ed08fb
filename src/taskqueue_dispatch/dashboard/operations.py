"""What the page brings into the dashboard."""

from __future__ import annotations

from taskqueue_dispatch.dashboard.live import live
from taskqueue_dispatch.dashboard.pages import PATH, act, show
from taskqueue_server.routing.extensions import Link
from taskqueue_server.routing.operations import Handler, Operation, Scope

__all__ = ["LINKS", "PAGES", "TEMPLATES"]


def _operation(method: str, path: str, handler: Handler) -> Operation:
    return Operation(
        method=method,
        path=path,
        handler=handler,
        verb="admin",
        scope=Scope.HANDLER,
        answers={200: None},
    )


PAGES = (
    _operation("GET", PATH, show),
    _operation("GET", f"{PATH}/live", live),
    _operation("POST", f"{PATH}/endpoints", act),
)
LINKS = (Link("Dispatch", PATH),)
TEMPLATES = "taskqueue_dispatch.dashboard"
