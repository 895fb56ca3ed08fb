"""Queues: figures, page by page or one by one, and purge."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.responses import Response

from taskqueue_core.concurrency import gather_all
from taskqueue_server.api.models import Count, LedgerOut, QueueOut, QueuesOut
from taskqueue_server.routing.operations import Operation, Query, RequestContext, Scope, answer
from taskqueue_server.routing.parameters import AFTER, LIMIT, link, page_of
from taskqueue_server.routing.schemas import NAME

_AT_ONCE = 20


async def queues(call: RequestContext) -> Response:
    """Return queues at a glance, by name, page by page: those that the token is for.

    Ask again with ``next`` as ``after`` until there is none; the header ``Link`` says the same.
    """
    keys, following = page_of(call, filter(call.is_allowed, await call.context.control.queues()))
    matches: list[QueueOut] = []
    for start in range(0, len(keys), _AT_ONCE):
        matches += await gather_all(
            _read_queue(call, key) for key in keys[start : start + _AT_ONCE]
        )
    return answer(QueuesOut(queues=matches, next=following), headers=link(call, following))


async def queue(call: RequestContext) -> Response:
    """Return one queue at a glance; an unknown one is empty."""
    return answer(await _read_queue(call, call.name("key")))


async def _read_queue(call: RequestContext, key: str) -> QueueOut:
    control = call.context.control
    return QueueOut.of(*await asyncio.gather(control.stats(key), control.settings(key)))


async def ledger(call: RequestContext) -> Response:
    """Return one queue's ledger, read in one step."""
    return answer(LedgerOut.of(await call.context.control.ledger(call.name("key"))))


async def total(call: RequestContext) -> Response:
    """Return the sum of all ledgers."""
    return answer(LedgerOut.of(await call.context.queue.ledger()))


async def purge(call: RequestContext) -> Response:
    """Cancel all waiting and scheduled tasks; what runs is left alone. Idempotent. It cannot be undone."""
    key = call.name("key")
    call.confirm(key)
    return answer(Count(await call.context.control.purge(key)))


_KEY = "/v1/queues/{key}"
_CONFIRM = Query("confirm", NAME, "the queue's key, once more", required=True, example="emails")
_operation = partial(Operation, tag="queues", verb="admin")
OPERATIONS = (
    _operation(
        id="queues_queues",
        method="GET",
        path="/v1/queues",
        handler=queues,
        scope=Scope.HANDLER,
        query=(LIMIT, AFTER),
        answers={200: QueuesOut},
        tells=("Link",),
    ),
    _operation(id="queues_queue", method="GET", path=_KEY, handler=queue, answers={200: QueueOut}),
    _operation(
        id="queues_ledger",
        method="GET",
        path=f"{_KEY}/ledger",
        handler=ledger,
        answers={200: LedgerOut},
    ),
    _operation(
        id="queues_total",
        method="GET",
        path="/v1/ledger",
        handler=total,
        scope=Scope.SERVER,
        answers={200: LedgerOut},
    ),
    _operation(
        id="queues_purge",
        method="POST",
        path=f"{_KEY}/purge",
        handler=purge,
        query=(_CONFIRM,),
        answers={200: Count},
    ),
)
