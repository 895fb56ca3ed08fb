"""Publishing during a migration: tasks whose ids the closed side knows are sent there, the others to the open side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from taskqueue_core.composite.backend import CompositeBackend, QueuePart
from taskqueue_core.composite.publisher import JointPublisher, by_key
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.migration.routing import NEW, OLD, MigrationRouter, ours
from taskqueue_core.tasks import Confirmation, State, Task, TaskStatus

_SKEW = 1.0
"""seconds by which the clocks of the two stores may differ"""


class MigratingPublisher(JointPublisher):
    """Implementation of `Publisher` during a migration. A task id is stored on one side only."""

    moving = "the queue is being moved to another backend"

    def __init__(self, composite: CompositeBackend, router: MigrationRouter) -> None:
        super().__init__(composite)
        self._router = router

    async def _round(
        self, tasks: Sequence[Task], indexes: list[int], answers: dict[int, Confirmation]
    ) -> list[int]:
        sides = {key: await self._router.open_side(key) for key in by_key(tasks, indexes)}
        remaining = [index for index in indexes if sides[tasks[index].key] is None]
        for number in (OLD, NEW):
            group = [index for index in indexes if sides[tasks[index].key] == number]
            known = await self._known(1 - number, tasks, group)
            elsewhere = await self._send(tasks, known, answers)
            fresh = [index for index in group if index not in known or index in elsewhere]
            targets = {index: QueuePart(number, tasks[index].key) for index in fresh}
            remaining += await self._send(tasks, targets, answers)
        turning: list[int] = []
        for key, group in by_key(tasks, sorted(remaining)).items():
            self._router.forget(key)
            _, settings = await self._router.authority(key)
            # An operator, not the migration, may have closed the queue: then its tasks stay refused.
            if settings.moved_to is None or ours(settings):
                turning += group
        return sorted(turning)

    async def _known(
        self, number: int, tasks: Sequence[Task], indexes: list[int]
    ) -> dict[int, QueuePart]:
        """Return the tasks whose ids a side remembers: their indexes, mapped to their queue on this side."""
        router = self._router
        groups = by_key(tasks, indexes)
        try:
            matches = await gather_all(
                router.ask(
                    number, partial(self._remembered, number, key, [tasks[p].id for p in batch])
                )
                for key, batch in groups.items()
            )
        except BackendUnavailable:
            if not router.is_optional(number):
                raise
            # A duplicate may be stored a second time, which is better than refusing every task.
            return {}
        return {
            index: QueuePart(number, key)
            for (key, batch), results in zip(groups.items(), matches, strict=True)
            for index, is_known in zip(batch, results, strict=True)
            if is_known
        }

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

    async def _open_part(self, task: Task) -> QueuePart:
        number = await self._router.open_side(task.key)
        return QueuePart(self._router.old_member if number is None else number, task.key)


def _forgettable(status: TaskStatus, window: float, now: float) -> bool:
    """Whether a side remembers a task only for its result, so that an open queue would accept the id again."""
    ended = not status.state.live and status.state is not State.DEAD
    return ended and now >= status.updated_at + window + _SKEW
