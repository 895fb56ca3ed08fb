"""Queues: figures, purge."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from taskqueue_core.server.models import Count, LedgerOut, QueueOut, QueuesOut
from taskqueue_core.server.operations import Call, Operation, Scope, answer

__all__ = ["OPERATIONS"]


async def queues(call: Call) -> Response:
    """Return all queues at a glance."""
    keys = [key for key in await call.hub.control.queues() if call.may(key)]
    return answer(QueuesOut([await _look(call, key) for key in keys]))


async def queue(call: Call) -> Response:
    """Return one queue at a glance; an unknown one is empty."""
    return answer(await _look(call, call.name("key")))


async def _look(call: Call, key: str) -> QueueOut:
    control = call.hub.control
    return QueueOut.of(*await asyncio.gather(control.stats(key), control.settings(key)))


async def ledger(call: Call) -> Response:
    """Return one queue's ledger, read in one step."""
    return answer(LedgerOut.of(await call.hub.control.ledger(call.name("key"))))


async def total(call: Call) -> Response:
    """Return the sum of all ledgers."""
    return answer(LedgerOut.of(await call.hub.queue.ledger()))


async def purge(call: Call) -> Response:
    """Cancel all waiting and scheduled tasks; what runs is left alone."""
    return answer(Count(await call.hub.control.purge(call.name("key"))))


_KEY = "/v1/queues/{key}"
OPERATIONS = (
    Operation(
        method="GET",
        path="/v1/queues",
        handler=queues,
        verb="admin",
        scope=Scope.HANDLER,
        answers={200: QueuesOut},
        problems=(503,),
    ),
    Operation(
        method="GET",
        path=_KEY,
        handler=queue,
        verb="admin",
        answers={200: QueueOut},
        problems=(503,),
    ),
    Operation(
        method="GET",
        path=f"{_KEY}/ledger",
        handler=ledger,
        verb="admin",
        answers={200: LedgerOut},
        problems=(503,),
    ),
    Operation(
        method="GET",
        path="/v1/ledger",
        handler=total,
        verb="admin",
        scope=Scope.SERVER,
        answers={200: LedgerOut},
        problems=(503,),
    ),
    Operation(
        method="POST",
        path=f"{_KEY}/purge",
        handler=purge,
        verb="admin",
        answers={200: Count},
        problems=(503,),
    ),
)
