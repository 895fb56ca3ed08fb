"""Bring a queue in line with the application's own database: what should be there and is not is published again."""

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
"""of payloads that are held at a time"""


class Reconciled(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the tasks that were given. Two reports add up."""

    checked: int = 0
    """how many were given"""
    missing: int = 0
    """how many of them the queue did not know"""
    republished: int = 0
    """how many of the missing are in the queue now"""
    refused: int = 0
    """how many of the missing have found no room; the next run tries again"""
    conflicts: int = 0
    """how many are known by their id, with another payload; the stored ones are untouched"""

    def __add__(self, other: Self) -> Self:
        """Sum up two reports, as of a run that went on where another one had ended."""
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
    """Publish those of ``tasks`` that the queue does not know, in batches, and report. Idempotent.

    ``tasks`` are what the application's database says is to be done: with the ids under which they are published, and
    nothing that has ended long ago. Leave out tasks that may be in the middle of a publish, for example those of
    the last minute: they would be counted as missing, without further harm.

    Where the backend has ``control`` the queue is asked for the ids first, and the payloads of those that it knows are
    not sent. ``compare`` sends them all, so that those with another payload are found. A batch waits for room for up
    to ``wait`` seconds. After each ``passed`` is called with its last task and the report so far: a caller
    that stores it can continue from there after an error; starting again does no harm either.

    A lost answer is asked for again with the same ids. Raises what `Queue.publish_many` raises.
    """
    if type(batch) is not int or not 0 < batch <= LIMITS.batch:
        raise InvalidInput("batch", kind_of(batch), f"1 to {LIMITS.batch}")
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
    if ask:  # one that was stored meanwhile, or whose first answer was lost, was missing too
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
