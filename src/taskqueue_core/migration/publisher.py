"""Publishing while a queue moves: one side is asked for the ids that it knows, the other takes in the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import structs

from taskqueue_core.capabilities import RoomBell
from taskqueue_core.composite.backend import Joint, JointBell
from taskqueue_core.concurrency import together
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.migration.routing import Crossing, MigrationMode, ours
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, Task, TaskStatus

__all__ = ["MigratingPublisher"]

_ROUNDS = 4
_SOON = 1.0
"""seconds after which who was refused while a queue turns may come again"""
_SKEW = 1.0
"""seconds by which clocks are trusted to agree"""


class MigratingPublisher:
    """See `taskqueue_core.backend.Publisher`. An id has one copy over both sides."""

    def __init__(self, crossing: Crossing, joint: Joint) -> None:
        """Publish where ``crossing`` says."""
        self._crossing = crossing
        self._joint = joint

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """See `taskqueue_core.backend.Publisher.publish`."""
        answers: dict[int, Confirmation] = {}
        left = list(range(len(tasks)))
        try:
            for _ in range(_ROUNDS):
                left = await self._on_the_move(tasks, await self._round(tasks, left, answers))
                if not left:
                    break
        except BackendUnavailable as error:
            if any(answer.status is Published.ACCEPTED for answer in answers.values()):
                raise PublishUnconfirmed("a side took only a part") from error
            raise
        for place in left:
            answers[place] = _turning(tasks[place])
        return tuple([answers[place] for place in range(len(tasks))])

    async def _round(
        self, tasks: Sequence[Task], places: list[int], answers: dict[int, Confirmation]
    ) -> list[int]:
        """Publish some of the tasks; return the places of those that nobody takes in at this moment."""
        groups: dict[int | None, list[int]] = {}
        for place in places:
            groups.setdefault(await self._crossing.open_side(tasks[place].key), []).append(place)
        left = groups.pop(None, [])
        for number, some in groups.items():
            if number is None:  # for the type checker: those were taken out
                continue
            known = await self._known(1 - number, tasks, some)
            elsewhere = await self._send(1 - number, tasks, known, answers)
            fresh = [place for place in some if place not in known or place in elsewhere]
            left += await self._send(number, tasks, fresh, answers)
        for place in left:
            self._crossing.forget(tasks[place].key)
        return sorted(left)

    async def _on_the_move(self, tasks: Sequence[Task], places: list[int]) -> list[int]:
        """Return the places of the tasks that the migration refuses, and not an operator: their queues turn."""
        turning = []
        for place in places:
            _, found = await self._crossing.authority(tasks[place].key)
            if found.moved_to is None or ours(found):
                turning.append(place)
        return turning

    async def _send(
        self,
        number: int,
        tasks: Sequence[Task],
        places: list[int],
        answers: dict[int, Confirmation],
    ) -> list[int]:
        """Publish on one side; return the places of those that it refuses because it is closed."""
        if not places:
            return []
        told = await self._crossing.sides[number].backend.publisher.publish(
            *[tasks[place] for place in places]
        )
        answers.update(zip(places, told, strict=True))
        return [place for place in places if answers[place].code is Refusal.MOVED]

    async def _known(self, number: int, tasks: Sequence[Task], places: list[int]) -> list[int]:
        """Return the places of the tasks whose ids a side remembers."""
        by_key: dict[str, list[int]] = {}
        for place in places:
            by_key.setdefault(tasks[place].key, []).append(place)
        crossing = self._crossing
        try:
            found = await together(
                crossing.ask(
                    number, partial(self._remembered, number, key, [tasks[p].id for p in some])
                )
                for key, some in by_key.items()
            )
        except BackendUnavailable:
            if crossing.mode is MigrationMode.STRICT or number != crossing.left:
                raise
            return []  # what it knows may be stored a second time: better than not at all
        known = {p for some, told in zip(by_key.values(), found, strict=True)
                 for p, one in zip(some, told, strict=True) if one}  # fmt: skip
        return [place for place in places if place in known]

    async def _remembered(self, number: int, key: str, ids: list[str]) -> list[bool]:
        control = self._crossing.sides[number].control
        now = self._crossing.sides[number].backend.now()
        known = [False] * len(ids)
        for name in self._crossing.copied_to.get(key) or (key,):  # it is the copies that are known
            told = await control.statuses(name, *ids)
            if any(told):
                window = (await control.settings(name)).dedupe_window
                for place, one in enumerate(told):
                    known[place] |= one is not None and not _forgettable(one, window, now)
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
        """See `taskqueue_core.backend.Publisher.schedule_retry`: on the side that has the task."""
        inner = None
        if settles is not None:
            number, inner = self._joint.inward(settles)
        else:
            number = await self._home(task)
        publisher = self._crossing.sides[number].backend.publisher
        return await publisher.schedule_retry(task, at, error=error, token=token, settles=inner)

    async def _home(self, task: Task) -> int:
        """Return the side that has a task, or else the one that takes in what is new."""
        found = await together(
            side.control.statuses(task.key, task.id) for side in self._crossing.sides
        )
        told = [(one, number) for number, (one,) in enumerate(found) if one is not None]
        if told:
            return max(told, key=lambda pair: (pair[0].state.live, pair[0].updated_at))[1]
        number = await self._crossing.open_side(task.key)
        return self._crossing.left if number is None else number

    def room_bell(self, *keys: str) -> RoomBell:
        """See `taskqueue_core.capabilities.RoomBells`."""
        return JointBell([side.backend for side in self._crossing.sides], [keys, keys])


def _forgettable(status: TaskStatus, window: float, now: float) -> bool:
    """Whether a side keeps a task for its result alone, and would take the id in anew if it were open."""
    ended = not status.state.live and status.state.value != "dead"
    return ended and now >= status.updated_at + window + _SKEW


def _turning(task: Task) -> Confirmation:
    return structs.replace(
        Confirmation(key=task.key, task_id=task.id, status=Published.REFUSED),
        code=Refusal.MOVED,
        reason="the queue is on its way from one store to another",
        retry_after=_SOON,
    )
