"""From a state that Prefect has accepted to an entry of the queue.

It happens inside a request, and inside its database transaction: so it never waits for room or for a store that is
away. The request is answered with 503 instead, its transaction is undone, and Prefect's clients come again by
themselves. What was put in by a transaction that is undone all the same is found out when it is handed out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from math import ceil
from typing import TYPE_CHECKING, NoReturn

import msgspec

from taskqueue_core.consumer.outage import OUTAGE_ERRORS
from taskqueue_core.tasks import Confirmation, Published
from taskqueue_prefect.context import LOG, Host
from taskqueue_prefect.task_runs import Run, due_at, state_id, task_of

if TYPE_CHECKING:
    from prefect.server.schemas.core import TaskRun


_RETRY_SECONDS = 1.0


async def put(host: Host, run: TaskRun) -> None:
    """Put a run in, for its time if it has one. Idempotent by run and state. HTTP 503 where that cannot be now."""
    async with answer_in_time(host):
        confirmation = await offer(host, run)
    if not confirmation.stored:
        LOG.warning("a run was refused: %s", confirmation.reason)
        _raise_unavailable(confirmation.reason or "the queue is full", confirmation.retry_after)


async def offer(host: Host, run: Run) -> Confirmation:
    """Put a run in, as `put` does; return what the queue says to it. Raises what the backend raises."""
    task, at = task_of(run), due_at(run)
    await host.prepare(task.key)
    if at is not None and at > host.backend.now():
        task = msgspec.structs.replace(task, not_before=at)
    (confirmation,) = await host.backend.publisher.publish(task)
    if confirmation.status is Published.CONFLICT:  # the run is known, in another state
        confirmation = await _schedule_again(host, run)
    return confirmation


async def schedule(host: Host, run: TaskRun) -> None:
    """Schedule another attempt of a run, for the time that its state says. As `put`, but never for want of room."""
    async with answer_in_time(host):
        await host.prepare(task_of(run).key)
        await _schedule_again(host, run)


async def _schedule_again(host: Host, run: Run) -> Confirmation:
    at = due_at(run)
    at = host.backend.now() if at is None else at
    token = state_id(run)
    return await host.backend.publisher.schedule_retry(task_of(run), at, token=token)


@contextlib.asynccontextmanager
async def answer_in_time(host: Host) -> AsyncIterator[None]:
    """Answer in time, whatever the store does: HTTP 503 where it is away."""
    try:
        async with asyncio.timeout(host.settings.patience):
            yield
    except (*OUTAGE_ERRORS, TimeoutError):
        host.forget()
        _raise_unavailable("the store of the task queue is unavailable", None)


def _raise_unavailable(detail: str, retry_after: float | None) -> NoReturn:
    from fastapi import HTTPException

    seconds = str(max(1, ceil(retry_after or _RETRY_SECONDS)))
    raise HTTPException(503, detail=detail, headers={"Retry-After": seconds})
