"""Reconciling a queue with the application's database: tasks that the queue does not know are published again."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Self

import msgspec

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import control_of, has
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, kind_of
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Published, Task

_BYTES = 8 * 1024 * 1024
"""total size of a batch's payloads, in bytes, at which the batch ends"""


class Reconciled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a reconciliation, in numbers of tasks. Two results can be added up.

    >>> Reconciled(checked=2, missing=1) + Reconciled(checked=3)
    Reconciled(checked=5, missing=1, ...)
    """

    checked: int = 0
    """number of tasks that the caller passed"""
    missing: int = 0
    """number of these tasks that the queue did not know"""
    republished: int = 0
    """number of missing tasks that were published again and are in the queue now"""
    refused: int = 0
    """number of missing tasks that the queue refused; the next run publishes them again"""
    conflicts: int = 0
    """number of tasks whose ids are stored with other payloads; the stored tasks are unchanged"""

    def __add__(self, other: Self) -> Self:
        """Add two results, for example of a run that was continued after an error."""
        return type(self)(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )


async def reconcile(
    queue: Queue,
    tasks: Iterable[Task] | AsyncIterable[Task],
    *,
    batch: int = 500,
    wait: float = 0,
    compare: bool = False,
    passed: Callable[[Task, Reconciled], None] | None = None,
) -> Reconciled:
    """Publish, in batches, the tasks that the queue does not know, and return what was done. Idempotent.

    ``tasks`` are the tasks that remain to be done according to the application's database, with the ids under which
    they are published. Leave out tasks that ended long ago: the queue may have forgotten them, and would run them
    again. Also leave out tasks that may be in the middle of a publish, such as those of the last minute: they would be
    counted as missing.

    If the backend has ``control``, the ids are looked up first, and payloads of known tasks are not sent. With
    ``compare``, all payloads are sent, to find ids that are stored with another payload. For each batch, the call waits
    up to ``wait`` seconds until a full queue has free capacity.

    After each batch, ``passed`` is called with the last task and the result so far. A caller that stores both can
    continue after that task if an error occurs; starting from the beginning does no harm either. If a response is lost,
    the batch is sent again with the same ids. Raises the errors of `Queue.publish_many`.

    >>> report = await reconcile(queue, [Task(key="mail", id="welcome-ada")])
    >>> report.missing, report.republished
    (1, 1)
    """
    if type(batch) is not int or not 0 < batch <= LIMITS.batch:
        raise InvalidInput("batch", kind_of(batch), f"a whole number from 1 to {LIMITS.batch}")
    ask = has(queue.backend, Capability.CONTROL) and not compare
    report = Reconciled()
    async for part in _parts(tasks, batch):
        report += await _reconcile_page(queue, part, wait, ask=ask)
        if passed is not None:
            passed(part[-1], report)
    return report


async def _reconcile_page(queue: Queue, tasks: list[Task], wait: float, *, ask: bool) -> Reconciled:
    unknown = await _unknown(queue, tasks) if ask else tasks
    answers = [confirmation.status for confirmation in await queue.publish_many(unknown, wait=wait)]
    stored, refused = answers.count(Published.ACCEPTED), answers.count(Published.REFUSED)
    if ask:  # a duplicate was missing, too: it was stored after its id was looked up
        stored += answers.count(Published.DUPLICATE)
    return Reconciled(
        checked=len(tasks),
        missing=stored + refused,
        republished=stored,
        refused=refused,
        conflicts=answers.count(Published.CONFLICT),
    )


async def _unknown(queue: Queue, tasks: list[Task]) -> list[Task]:
    control = control_of(queue.backend)
    by_key: dict[str, list[Task]] = {}
    for task in tasks:
        by_key.setdefault(task.key, []).append(task)
    unknown: list[Task] = []
    for key, those in by_key.items():
        statuses = await control.statuses(key, *(task.id for task in those))
        unknown += [task for task, status in zip(those, statuses, strict=True) if status is None]
    return unknown


async def _parts(
    tasks: Iterable[Task] | AsyncIterable[Task], batch: int
) -> AsyncIterator[list[Task]]:
    part: list[Task] = []
    size = 0
    async for task in _each(tasks):
        part.append(task)
        size += len(task.payload)
        if len(part) == batch or size >= _BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


async def _each(tasks: Iterable[Task] | AsyncIterable[Task]) -> AsyncIterator[Task]:
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield task
    else:
        for task in tasks:
            yield task
