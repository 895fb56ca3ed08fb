"""Publishing during a migration: a task goes to the closed side if that side knows its id, or else to the open side."""

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
"""maximum number of seconds by which the clocks of the two stores may differ"""


class MigratingPublisher(JointPublisher):
    """Implementation of `Publisher` during a migration. If both sides are available, each id is stored on one only."""

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
            keyed = await self._keyed(1 - number, tasks, group)
            here = await self._known(number, tasks, list(keyed))  # these get the answer of their id
            known = {index: part for index, part in keyed.items() if index not in here}
            known |= await self._known(1 - number, tasks, group)
            elsewhere = await self._send_to_holders(tasks, known, answers)
            fresh = [index for index in group if index not in known or index in elsewhere]
            targets = {index: QueuePart(number, tasks[index].key) for index in fresh}
            remaining += await self._send(tasks, targets, answers)
        turning: list[int] = []
        for key, group in by_key(tasks, sorted(remaining)).items():
            self._router.forget(key)
            _, settings = await self._router.authority(key)
            # A queue that an operator closed (not the migration) still refuses its tasks.
            if settings.moved_to is None or ours(settings):
                turning += group
        return sorted(turning)

    async def _keyed(
        self, number: int, tasks: Sequence[Task], indexes: list[int]
    ) -> dict[int, QueuePart]:
        """Return the indexes of the tasks with unique keys, mapped to their queue on a side that is closed.

        That side refuses a task whose key no task of its holds.
        """
        router, member = self._router, self._router.members[number]
        found: dict[int, QueuePart] = {}
        unique = [index for index in indexes if tasks[index].unique is not None]
        for key, batch in by_key(tasks, unique).items():
            try:
                settings = await router.ask(number, partial(member.control.settings, key))
            except BackendUnavailable:
                if not router.is_optional(number):
                    raise
            else:
                if ours(settings):
                    found |= dict.fromkeys(batch, QueuePart(number, key))
        return found

    async def _known(
        self, number: int, tasks: Sequence[Task], indexes: list[int]
    ) -> dict[int, QueuePart]:
        """Return the indexes of the tasks whose ids a side remembers, each mapped to the queue on that side."""
        router = self._router
        member = router.members[number]
        known: dict[int, QueuePart] = {}

        async def look_up(key: str, batch: list[int]) -> None:
            # With fan-out, only the queues that store the copies know the tasks' ids.
            for name in router.copied_to.get(key) or (key,):
                now = member.backend.now()
                statuses = await member.control.statuses(name, *[tasks[i].id for i in batch])
                if any(statuses):
                    window = (await member.control.settings(name)).dedupe_window
                    for index, status in zip(batch, statuses, strict=True):
                        if status is not None and not _forgettable(status, window, now):
                            known[index] = QueuePart(number, key)

        try:
            await gather_all(
                router.ask(number, partial(look_up, key, batch))
                for key, batch in by_key(tasks, indexes).items()
            )
        except BackendUnavailable:
            if not router.is_optional(number):
                raise
            # A task may now be stored twice, which is better than refusing every task.
            return {}
        return known

    async def _open_part(self, task: Task) -> QueuePart:
        number = await self._router.open_side(task.key)
        return QueuePart(self._router.old_member if number is None else number, task.key)


def _forgettable(status: TaskStatus, window: float, now: float) -> bool:
    """Return whether a task is remembered only for its result, so that an open queue would accept its id again."""
    ended = not status.state.live and status.state is not State.DEAD
    return ended and now >= status.updated_at + window + _SKEW
