"""The page of the audit log."""

from __future__ import annotations

from starlette.responses import Response

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_server.api.audit import visible
from taskqueue_server.dashboard.pages import render
from taskqueue_server.routing.operations import RequestContext

_PAGE = 100


async def audit(call: RequestContext) -> Response:
    """Show what operators have done, newest first."""
    after, able = (
        call.request.query_params.get("after"),
        has(call.context.backend, Capability.AUDIT),
    )
    entries, following = await visible(call, after, _PAGE) if able else ([], None)
    return await render(
        call,
        "audit.html",
        entries=entries,
        following=following,
        paged=after is not None,
        able=able,
    )
