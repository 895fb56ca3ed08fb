"""Answers that come once a task has ended: what the query says of them, and the wait."""

from __future__ import annotations

import asyncio

from taskqueue_core.concurrency import first_completed
from taskqueue_core.tasks import TaskStatus
from taskqueue_server.context.waiters import MAX_WAIT
from taskqueue_server.routing.operations import Query, RequestContext, unauthenticated

WAIT = Query(
    "wait",
    {"type": "integer", "minimum": 0, "maximum": MAX_WAIT, "default": 0},
    "how many seconds to wait for the end of the task",
    example=20,
)


def seconds(call: RequestContext) -> int:
    """Return for how long the query asks to wait. Raises `InvalidInput`."""
    return call.number("wait", 0, MAX_WAIT, lowest=0)


async def waited(call: RequestContext, status: TaskStatus | None, most: int) -> bool:
    """Wait ``most`` seconds, if the task may still end; tell whether anything can have changed.

    Raises `ProblemError` where too many wait, and where who asks may not any more.
    """
    if not most or status is None or not status.state.live:
        return False
    with call.watch_access() as dismissed:
        gone = _client_left(call, dismissed)
        await call.context.waiters.wait(status.key, status.task_id, most, gone, call.client_name)
    if dismissed.is_set():
        raise unauthenticated()
    return True


async def _client_left(call: RequestContext, dismissed: asyncio.Event) -> None:
    """Return when nobody is there any more who would read the answer, or who may."""
    await first_completed(_hung_up(call), _set(dismissed))


async def _hung_up(call: RequestContext) -> None:
    while (await call.request.receive())["type"] != "http.disconnect":
        pass


async def _set(event: asyncio.Event) -> None:
    await event.wait()
