"""How many workers a queue needs, for what scales them."""

from __future__ import annotations

import asyncio
from math import ceil

import msgspec
from starlette.responses import Response

from taskqueue_core.limits import LIMITS
from taskqueue_server.routing.operations import Operation, Query, RequestContext, answer

_PER_WORKER = 10


class ScalingOut(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to do in one queue."""

    key: str
    value: int
    """tasks that wait or run: what to scale by"""
    waiting: int
    in_flight: int
    oldest_age_seconds: float
    """how long the oldest waiting task has been waiting; 0 where none is"""
    workers: int
    """open subscriptions, on all replicas"""
    replicas: int
    """how many workers that takes; no more than the queue's limit lets work, and none while it is paused"""


async def scaling(call: RequestContext) -> Response:
    """Return what there is to do in one queue; an unknown one is empty. For KEDA's metrics-api, and others like it."""
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


OPERATIONS = (
    Operation(
        id="scaling_scaling",
        method="GET",
        path="/v1/scaling/{key}",
        handler=scaling,
        verb="consume",
        answers={200: ScalingOut},
        query=(
            Query(
                "per_worker",
                {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": LIMITS.credit,
                    "default": _PER_WORKER,
                },
                "how many tasks one worker runs at once",
            ),
        ),
        tag="queues",
    ),
)
