"""Enqueuing task runs whose state Prefect has accepted.

A run is enqueued within an HTTP request and its database transaction. Therefore this module does not wait for room in
a full queue, and waits at most ``patience`` seconds for the store. If the run cannot be enqueued, the response is 503,
the transaction is rolled back, and Prefect's clients retry. If a transaction is rolled back after its run was enqueued,
the delivered run is dropped, because the database does not have it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from math import ceil
from typing import NoReturn

import msgspec

from taskqueue_core.consumer.outage import OUTAGE_ERRORS
from taskqueue_core.tasks import Confirmation, Published
from taskqueue_prefect.context import LOG, Host
from taskqueue_prefect.names import name_of
from taskqueue_prefect.prefect_types import TaskRun
from taskqueue_prefect.task_runs import Run, task_of

_RETRY_SECONDS = 1.0


async def put(host: Host, run: TaskRun) -> None:
    """Enqueue a run, for its scheduled time or at once. Idempotent per run and state. Raises HTTP 503 on failure."""
    async with answer_in_time(host):
        confirmation = await offer(host, Run.of(run))
    if not confirmation.stored:
        LOG.warning("a run was refused: %s", confirmation.reason)
        _raise_unavailable(confirmation.reason or "the queue is full", confirmation.retry_after)


async def offer(host: Host, run: Run) -> Confirmation:
    """Enqueue a run as `put` does, but return the confirmation, and raise the backend's errors."""
    task, at = task_of(run), run.due_at
    await host.prepare(task.key)
    if at is not None and at > host.backend.now():
        task = msgspec.structs.replace(task, not_before=at)
    (confirmation,) = await host.backend.publisher.publish(task)
    if confirmation.status is Published.CONFLICT:  # the queue has the run, with another state
        confirmation = await _schedule_again(host, run)
    return confirmation


async def schedule(host: Host, run: TaskRun) -> None:
    """Schedule another attempt of a run, for the time in its new state or at once. The queue's capacity is ignored."""
    async with answer_in_time(host):
        await host.prepare(name_of(run.task_key))
        await _schedule_again(host, Run.of(run))


async def _schedule_again(host: Host, run: Run) -> Confirmation:
    at = host.backend.now() if run.due_at is None else run.due_at
    return await host.backend.publisher.schedule_retry(task_of(run), at, token=run.state_id)


@contextlib.asynccontextmanager
async def answer_in_time(host: Host) -> AsyncIterator[None]:
    """Raise HTTP 503 if the store is unavailable, or does not answer within the setting ``patience``."""
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
