"""The audit log: what operators have done."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from taskqueue_core.capabilities import AuditEntry, audit_of
from taskqueue_core.capabilities.audit import check_audit_page
from taskqueue_core.limits import LIMITS
from taskqueue_server.auth.access import OBSERVING, may_observe
from taskqueue_server.routing.operations import Operation, Query, RequestContext, Scope, answer
from taskqueue_server.routing.parameters import LIMIT, link

_PAGE = 100
_READS = 20
"""maximum number of pages of the store that are read for one response"""


class AuditOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of the audit log. If there is a ``next``, pass it as ``after`` for the next page."""

    entries: tuple[AuditEntry, ...]
    next: str | None = None


async def audit(call: RequestContext) -> Response:
    """Return what operators have done, newest first: who, what, to which queue, and how many tasks.

    Entries about queues that the token does not permit are omitted, and without a token for all queues, those that
    concern no single queue. A page may be short or empty although more pages follow.
    """
    after = call.request.query_params.get("after")
    shown, following = await visible(call, after, call.number("limit", _PAGE, LIMITS.batch))
    return answer(AuditOut(entries=tuple(shown), next=following), headers=link(call, following))


async def visible(
    call: RequestContext, after: str | None, limit: int
) -> tuple[list[AuditEntry], str | None]:
    """Return a page of the entries that the client may see, and the ``after`` of the next page."""
    check_audit_page(after, limit)
    log = audit_of(call.context.backend)
    found: list[AuditEntry] = []
    for _ in range(_READS):
        page = await log.entries(after=after, limit=limit)
        for entry in page:
            after = entry.id
            if call.identity is None or may_observe(call.identity, entry.key):
                found.append(entry)
            if len(found) == limit:
                return found, after
        if len(page) < limit:
            return found, None
    return found, after


OPERATIONS = (
    Operation(
        "GET",
        "/v1/audit",
        audit,
        {200: AuditOut},
        id="audit_entries",
        verb=OBSERVING,
        scope=Scope.HANDLER,
        query=(
            LIMIT,
            Query(
                "after",
                {"type": "string", "pattern": "^[0-9]{1,15}(-[0-9]{1,10})?$"},
                "the `next` of the previous page",
                example="1795982400000-0",
            ),
        ),
        response_headers=("Link",),
    ),
)
