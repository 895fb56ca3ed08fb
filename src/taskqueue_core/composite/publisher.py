"""Publishing to a composite backend: rounds of calls, until every task is stored in the right part or refused."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from typing import Any, Self

from msgspec import structs

from taskqueue_core.authoring.helpers import check_size
from taskqueue_core.capabilities import RoomSignal
from taskqueue_core.composite.backend import CompositeBackend, QueuePart, renamed
from taskqueue_core.concurrency import first_completed
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, Task

_ROUNDS = 5
_CHANGES = (Published.ACCEPTED, Published.REPLACED)
"""statuses of tasks whose publish changed something"""
_POLL_SECONDS = 1.0
"""seconds that a publisher should wait after a task was refused because its queue is being moved"""


class JointPublisher(ABC):
    """The base class of a composite backend's `Publisher`. A subclass decides which part of a queue accepts a task."""

    moving: str
    """the reason that a confirmation gives for refusing a task while its queue is being moved"""

    def __init__(self, composite: CompositeBackend) -> None:
        self._composite = composite

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        check_size("tasks", tasks)
        answers: dict[int, Confirmation] = {}
        remaining: list[int] = []
        try:
            for run in _runs(tasks):
                remaining += await self._publish(tasks, run, answers)
        except BackendUnavailable as error:
            if any(answer.status in _CHANGES for answer in answers.values()):
                raise PublishUnconfirmed("only part of the batch was accepted") from error
            raise
        for index in remaining:
            answers[index] = Confirmation(
                key=tasks[index].key,
                task_id=tasks[index].id,
                status=Published.REFUSED,
                code=Refusal.MOVED,
                reason=self.moving,
                retry_after=_POLL_SECONDS,
            )
        return tuple([answers[index] for index in range(len(tasks))])

    async def _publish(
        self, tasks: Sequence[Task], indexes: list[int], answers: dict[int, Confirmation]
    ) -> list[int]:
        """Publish the tasks at these indexes; return the indexes of those that no part has accepted in time."""
        for _ in range(_ROUNDS):
            indexes = await self._round(tasks, indexes, answers)
            if not indexes:
                break
        return indexes

    @abstractmethod
    async def _round(
        self, tasks: Sequence[Task], indexes: list[int], answers: dict[int, Confirmation]
    ) -> list[int]:
        """Publish the tasks at these indexes; return the indexes of the tasks to publish again in another round."""

    async def _send(
        self,
        tasks: Sequence[Task],
        targets: dict[int, QueuePart],
        answers: dict[int, Confirmation],
    ) -> list[int]:
        """Publish each task to its target; return the indexes of the tasks that a closed target refused."""
        by_member: dict[int, list[int]] = {}
        for index in sorted(targets):
            by_member.setdefault(targets[index].member, []).append(index)
        for member, indexes in by_member.items():
            confirmations = await self._composite.members[member].backend.publisher.publish(
                *[renamed(tasks[index], targets[index].key) for index in indexes]
            )
            for index, answer in zip(indexes, confirmations, strict=True):
                answers[index] = for_key(answer, tasks[index].key)
        return [index for index in sorted(targets) if answers[index].code is Refusal.MOVED]

    async def _send_to_holders(
        self,
        tasks: Sequence[Task],
        targets: dict[int, QueuePart],
        answers: dict[int, Confirmation],
    ) -> list[int]:
        """Publish each task to a closed target, which may know its id or hold its key; return those that it refused.

        A target refuses a member of a closed batch before it looks at keys. If it does not hold the key of the member,
        another part may know the member's id, so that part answers.
        """
        refused = await self._send(tasks, targets, answers)
        asked, late = list(tasks), dict[int, QueuePart]()
        for index, part in targets.items():
            task = tasks[index]
            if answers[index].code is Refusal.BATCH_CLOSED and task.unique is not None:
                unique = structs.replace(task.unique, on_conflict="refuse", debounce=None)
                asked[index], late[index] = structs.replace(task, batch=None, unique=unique), part
        return sorted([*refused, *await self._send(asked, late, {})]) if late else refused

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
        free: bool = False,
        traceback: str | None = None,
    ) -> Confirmation:
        inner = None
        if settles is None:
            part = await self._part_of(task)
        else:
            member, inner = self._composite.to_member(settles)
            part = QueuePart(member, inner.task.key)
        confirmation = await self._composite.members[part.member].backend.publisher.schedule_retry(
            renamed(task, part.key),
            at,
            error=error,
            token=token,
            settles=inner,
            free=free,
            traceback=traceback,
        )
        return for_key(confirmation, task.key)

    async def _part_of(self, task: Task) -> QueuePart:
        """Return the part that has a task or had it last, or else the part that accepts new tasks."""
        (found,) = await self._composite.locate(task.key, [task.id])
        return found[0] if found else await self._open_part(task)

    @abstractmethod
    async def _open_part(self, task: Task) -> QueuePart:
        """Return the part that accepts a new task."""

    def room_signal(self, *keys: str) -> RoomSignal:
        publishers: list[Any] = [member.backend.publisher for member in self._composite.members]
        return CombinedSignal(
            [
                publisher.room_signal(*keys)
                for publisher in publishers
                if hasattr(publisher, "room_signal")
            ]
        )


class CombinedSignal:
    """A `RoomSignal` of several backends: a notification from any of them ends the wait."""

    def __init__(self, signals: Sequence[RoomSignal]) -> None:
        self._signals = signals
        self._open = AsyncExitStack()

    async def wait(self, timeout: float) -> None:
        waits = [signal.wait(timeout) for signal in self._signals]
        await first_completed(*waits, asyncio.sleep(timeout))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            for signal in self._signals:
                await opened.enter_async_context(signal)
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()


def _runs(tasks: Sequence[Task]) -> list[list[int]]:
    """Return the indexes of tasks that are published together.

    A task must not be stored before its parents, which may precede it in the same call. So if a task waits for others,
    the tasks are published in their order: together only if they follow one another and have the same queue.
    """
    indexes = range(len(tasks))
    if all(task.after is None for task in tasks):
        return [list(indexes)] if tasks else []
    return [list(run) for _, run in groupby(indexes, key=lambda index: tasks[index].key)]


def by_key(tasks: Sequence[Task], indexes: Iterable[int]) -> dict[str, list[int]]:
    """Group the indexes of tasks by the tasks' keys."""
    groups: dict[str, list[int]] = {}
    for index in indexes:
        groups.setdefault(tasks[index].key, []).append(index)
    return groups


def for_key(confirmation: Confirmation, key: str) -> Confirmation:
    """Return the confirmation with the public name of its queue."""
    return confirmation if confirmation.key == key else structs.replace(confirmation, key=key)
