"""Queues: statistics, scaling, purge and deletion."""

from __future__ import annotations

import asyncio
from functools import partial
from math import ceil

import msgspec
from starlette.responses import Response

from taskqueue_core.capabilities import DeletedQueue
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Ledger
from taskqueue_server.api.models import Count, LedgerOut, QueueOut, QueuesOut
from taskqueue_server.auth.access import OBSERVING
from taskqueue_server.context.server import read_each
from taskqueue_server.context.statistics import AT_ONCE
from taskqueue_server.routing.operations import Operation, Query, RequestContext, Scope, answer
from taskqueue_server.routing.parameters import AFTER, LIMIT, link, page_of
from taskqueue_server.routing.schemas import NAME

_PER_WORKER = 10


class ScalingOut(msgspec.Struct, frozen=True, kw_only=True):
    """The amount of work in one queue."""

    key: str
    value: int
    """number of waiting and running tasks, from which an autoscaler computes the number of workers"""
    waiting: int
    in_flight: int
    oldest_age_seconds: float
    """age of the oldest waiting task in seconds; 0 if no task waits"""
    workers: int
    """number of open subscriptions, on all replicas of the server"""
    replicas: int
    """number of workers needed for all waiting and running tasks, or for as many as ``max_inflight`` permits; if the
    queue is paused, only for the running tasks"""


async def scaling(call: RequestContext) -> Response:
    """Return the amount of work in a queue, for autoscalers such as KEDA's metrics-api; an unknown queue is empty."""
    key = call.name("key")
    per_worker = call.number("per_worker", _PER_WORKER, LIMITS.credit)
    control = call.context.control
    stats, settings = await asyncio.gather(control.stats(key), control.settings(key))
    waiting, running = stats.ledger.waiting, stats.ledger.in_flight
    at_once = waiting + running
    if settings.paused:
        at_once = running
    elif settings.max_inflight:
        at_once = min(at_once, max(running, settings.max_inflight))
    oldest = stats.oldest_waiting
    now = call.context.backend.now()
    return answer(
        ScalingOut(
            key=key,
            value=waiting + running,
            waiting=waiting,
            in_flight=running,
            oldest_age_seconds=0.0 if oldest is None else max(0.0, now - oldest),
            workers=stats.subscribers,
            replicas=ceil(at_once / per_worker),
        )
    )


async def queues(call: RequestContext) -> Response:
    """List statistics and limits of the queues that the token permits, sorted by name.

    Repeat the request with ``next`` as ``after`` until the response has no ``next``. The header ``Link`` has the URL of
    the next page.
    """
    keys, following = page_of(call, filter(call.is_allowed, await call.context.control.queues()))
    found = await read_each(partial(_read_queue, call), keys, AT_ONCE)
    return answer(QueuesOut(queues=found, next=following), headers=link(call, following))


async def queue(call: RequestContext) -> Response:
    """Return statistics and limits of one queue; an unknown queue is empty."""
    return answer(await _read_queue(call, call.name("key")))


async def _read_queue(call: RequestContext, key: str) -> QueueOut:
    control = call.context.control
    return QueueOut.of(*await asyncio.gather(control.stats(key), control.settings(key)))


async def ledger(call: RequestContext) -> Response:
    """Return the ledger of one queue, with all counts taken at the same time."""
    return _ledger(await call.context.control.ledger(call.name("key")))


async def total(call: RequestContext) -> Response:
    """Return the sum of the ledgers of all queues."""
    return _ledger(await call.context.queue.ledger())


def _ledger(ledger: Ledger) -> Response:
    return answer(msgspec.convert(ledger, LedgerOut, from_attributes=True))


async def purge(call: RequestContext) -> Response:
    """Cancel all blocked, waiting and scheduled tasks of a queue, but no running ones. Idempotent. Cannot be undone."""
    key = call.name("key")
    call.confirm(key)
    count = await call.context.control.purge(key)
    call.note("purge", key, tasks=count)
    return answer(Count(count))


async def delete(call: RequestContext) -> Response:
    """Delete a queue with its settings, and the records and results of its ended tasks. This cannot be undone.

    A queue with tasks, dead letters or consumers is not deleted: the response is 409. Idempotent: ``deleted`` is false
    if there was no such queue.
    """
    key = call.name("key")
    call.confirm(key)
    done = await call.context.control.delete(key)
    call.note("delete queue", key)
    return answer(done)


_KEY = "/v1/queues/{key}"
_CONFIRM = Query("confirm", NAME, "the queue's key, to confirm", required=True, example="emails")
_TASKS_PER_WORKER = Query(
    "per_worker",
    {"type": "integer", "minimum": 1, "maximum": LIMITS.credit, "default": _PER_WORKER},
    "number of tasks that one worker runs concurrently",
)
_operation = partial(Operation, tag="queues", verb="admin")
_reading = partial(_operation, "GET", verb=OBSERVING)
OPERATIONS = (
    _reading(
        "/v1/queues",
        queues,
        {200: QueuesOut},
        id="queues_queues",
        scope=Scope.HANDLER,
        query=(LIMIT, AFTER),
        response_headers=("Link",),
    ),
    _reading(_KEY, queue, {200: QueueOut}, id="queues_queue"),
    _reading(f"{_KEY}/ledger", ledger, {200: LedgerOut}, id="queues_ledger"),
    _reading("/v1/ledger", total, {200: LedgerOut}, id="queues_total", scope=Scope.SERVER),
    _operation("POST", f"{_KEY}/purge", purge, {200: Count}, id="queues_purge", query=(_CONFIRM,)),
    _operation(
        "DELETE",
        _KEY,
        delete,
        {200: DeletedQueue},
        id="queues_delete",
        query=(_CONFIRM,),
        problems=(409,),
    ),
    Operation(
        "GET",
        "/v1/scaling/{key}",
        scaling,
        {200: ScalingOut},
        id="scaling_scaling",
        verb="consume",
        query=(_TASKS_PER_WORKER,),
        tag="queues",
    ),
)
