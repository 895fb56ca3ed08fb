"""Helpers that publish the callbacks of jobs and wait for their delivery."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Published, Task
from taskqueue_dispatch.callbacks.records import CallbackRecord
from taskqueue_dispatch.callbacks.sender import Sender
from taskqueue_dispatch.callbacks.tasks import callback_task
from taskqueue_dispatch.names import CALLBACKS, job_id, queue_of
from tests.dispatch.patience import eventually
from tests.dispatch.receivers import Call, Receiver

QUICK = RetryPolicy(base=0.01, cap=0.02, jitter=0)
CANARY = "canary-of-the-receiver"


def job_for(
    receiver: Receiver,
    name: str = "one",
    host: str = "127.0.0.1",
    path: str = "/",
    tenant: str | None = None,
) -> Task:
    """Return a job whose callback URL points to the receiver."""
    url = f"http://{host}:{receiver.port}{path}"
    return Task(
        key=queue_of("m"), id=job_id("m", name), headers={"callback-url": url}, tenant=tenant
    )


async def tell(backend: Backend, *jobs: Task, result: bytes = b'{"a":1}') -> None:
    """Publish one callback for each job, with status "done" and the given result."""
    calls = [callback_task(job, "done", result, None) for job in jobs]
    told = await backend.publisher.publish(*calls)
    assert all(one.status is Published.ACCEPTED for one in told)


async def quick(backend: Backend, **changes: Any) -> None:
    """Configure the callback queue with very short retry delays, as an operator could."""
    settled = QueueSettings(retry=QUICK, **changes)
    await control_of(backend).configure(CALLBACKS, settled)


async def ended(sender: Sender, *jobs: Task) -> list[CallbackRecord]:
    """Wait until no callback of these jobs is pending, and return their records."""

    async def records() -> list[CallbackRecord] | None:
        found = [await sender.record(job.id) for job in jobs]
        whole = [one for one in found if one is not None and one.state != "pending"]
        return whole if len(whole) == len(jobs) else None

    found: list[CallbackRecord] = await eventually(records)
    return found


async def failed_once(sender: Sender, job: Task) -> CallbackRecord:
    """Wait until an attempt of the job's callback has failed, and return the callback's record."""

    async def record() -> CallbackRecord | None:
        found = await sender.record(job.id)
        return found if found is not None and found.error else None

    found: CallbackRecord = await eventually(record)
    return found


def ids(calls: Iterable[Call]) -> set[str]:
    """Return the ``webhook-id`` headers of the calls."""
    return {call.headers["webhook-id"] for call in calls}
