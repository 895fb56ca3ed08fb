"""Publishing during a migration: tasks whose ids the closed side knows are sent there, the others to the open side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import structs

from taskqueue_core.capabilities import RoomSignal
from taskqueue_core.composite.backend import CombinedSignal, CompositeBackend
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.migration.routing import MigrationMode, MigrationRouter, ours
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, Task, TaskStatus

_ROUNDS = 4
_POLL_SECONDS = 1.0
"""suggested delay, in seconds, for a publish that was refused because its queue changes sides"""
_SKEW = 1.0
"""seconds by which the clocks of the two stores may differ"""


class MigratingPublisher:
    """Implementation of `Publisher` during a migration. A task id is stored on one side only."""

    def __init__(self, router: MigrationRouter, joint: CompositeBackend) -> None:
        self._router = router
        self._joint = joint

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers: dict[int, Confirmation] = {}
        remaining = list(range(len(tasks)))
        try:
            for _ in range(_ROUNDS):
                remaining = await self._on_the_move(
                    tasks, await self._round(tasks, remaining, answers)
                )
                if not remaining:
                    break
        except BackendUnavailable as error:
            if any(answer.status is Published.ACCEPTED for answer in answers.values()):
                raise PublishUnconfirmed("one backend accepted only part of the batch") from error
            raise
        for index in remaining:
            answers[index] = _turning(tasks[index])
        return tuple([answers[index] for index in range(len(tasks))])

    async def _round(
        self, tasks: Sequence[Task], indexes: list[int], answers: dict[int, Confirmation]
    ) -> list[int]:
        """Publish some of the tasks; return the indexes of those that neither side accepts now."""
        groups: dict[int | None, list[int]] = {}
        for index in indexes:
            groups.setdefault(await self._router.open_side(tasks[index].key), []).append(index)
        remaining = groups.pop(None, [])
        for number, group in groups.items():
            if number is None:  # removed above; only the type checker needs this
                continue
            known = await self._known(1 - number, tasks, group)
            elsewhere = await self._send(1 - number, tasks, known, answers)
            fresh = [index for index in group if index not in known or index in elsewhere]
            remaining += await self._send(number, tasks, fresh, answers)
        for place in remaining:
            self._router.forget(tasks[place].key)
        return sorted(remaining)

    async def _on_the_move(self, tasks: Sequence[Task], indexes: list[int]) -> list[int]:
        """Return the indexes of the tasks that were refused because their queues are changing sides.

        The others are in queues that an operator has closed.
        """
        turning = []
        for index in indexes:
            _, settings = await self._router.authority(tasks[index].key)
            if settings.moved_to is None or ours(settings):
                turning.append(index)
        return turning

    async def _send(
        self,
        number: int,
        tasks: Sequence[Task],
        indexes: list[int],
        answers: dict[int, Confirmation],
    ) -> list[int]:
        """Publish tasks on one side; return the indexes of those that it refuses because the queue is closed there."""
        if not indexes:
            return []
        confirmations = await self._router.members[number].backend.publisher.publish(
            *[tasks[index] for index in indexes]
        )
        answers.update(zip(indexes, confirmations, strict=True))
        return [index for index in indexes if answers[index].code is Refusal.MOVED]

    async def _known(self, number: int, tasks: Sequence[Task], indexes: list[int]) -> list[int]:
        """Return the indexes of the tasks whose ids a side remembers."""
        by_key: dict[str, list[int]] = {}
        for index in indexes:
            by_key.setdefault(tasks[index].key, []).append(index)
        router = self._router
        try:
            matches = await gather_all(
                router.ask(
                    number, partial(self._remembered, number, key, [tasks[p].id for p in batch])
                )
                for key, batch in by_key.items()
            )
        except BackendUnavailable:
            if router.mode is MigrationMode.STRICT or number != router.old_member:
                raise
            # A duplicate may be stored a second time, which is better than refusing every task.
            return []
        known = {p for batch, results in zip(by_key.values(), matches, strict=True)
                 for p, item in zip(batch, results, strict=True) if item}  # fmt: skip
        return [index for index in indexes if index in known]

    async def _remembered(self, number: int, key: str, ids: list[str]) -> list[bool]:
        control = self._router.members[number].control
        now = self._router.members[number].backend.now()
        known = [False] * len(ids)
        # With fan-out, only the queues that store the copies know the ids.
        for name in self._router.copied_to.get(key) or (key,):
            statuses = await control.statuses(name, *ids)
            if any(statuses):
                window = (await control.settings(name)).dedupe_window
                for index, status in enumerate(statuses):
                    known[index] |= status is not None and not _forgettable(status, window, now)
        return known

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
    ) -> Confirmation:
        """Schedule the next attempt on the side that has the task."""
        inner = None
        if settles is not None:
            number, inner = self._joint.to_member(settles)
        else:
            number = await self._member_of(task)
        publisher = self._router.members[number].backend.publisher
        return await publisher.schedule_retry(task, at, error=error, token=token, settles=inner)

    async def _member_of(self, task: Task) -> int:
        """Return the side that has a task, or else the side that accepts new tasks."""
        statuses = await gather_all(
            member.control.statuses(task.key, task.id) for member in self._router.members
        )
        results = [
            (status, number) for number, (status,) in enumerate(statuses) if status is not None
        ]
        if results:
            return max(results, key=lambda pair: (pair[0].state.live, pair[0].updated_at))[1]
        number = await self._router.open_side(task.key)
        return self._router.old_member if number is None else number

    def room_signal(self, *keys: str) -> RoomSignal:
        return CombinedSignal([member.backend for member in self._router.members], [keys, keys])


def _forgettable(status: TaskStatus, window: float, now: float) -> bool:
    """Whether a side remembers a task only for its result, so that an open queue would accept the id again."""
    ended = not status.state.live and status.state.value != "dead"
    return ended and now >= status.updated_at + window + _SKEW


def _turning(task: Task) -> Confirmation:
    return structs.replace(
        Confirmation(key=task.key, task_id=task.id, status=Published.REFUSED),
        code=Refusal.MOVED,
        reason="the queue is being moved to another backend",
        retry_after=_POLL_SECONDS,
    )
