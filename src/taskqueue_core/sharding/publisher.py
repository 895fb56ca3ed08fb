"""Publishing to shards: the generations before are asked for the ids that they know, the last one takes in the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from taskqueue_core.capabilities import RoomBell
from taskqueue_core.composite.backend import JointBell
from taskqueue_core.concurrency import together
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.sharding.generations import Generation, demand_no_shard, renamed, shard_of
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, Task

if TYPE_CHECKING:
    from taskqueue_core.sharding.backend import ShardedBackend

__all__ = ["ShardedPublisher"]

_ROUNDS = 5


class ShardedPublisher:
    """See `taskqueue_core.backend.Publisher`. What is not sharded is passed on as it is."""

    def __init__(self, backend: ShardedBackend) -> None:
        """Publish to the shards of ``backend``."""
        self._backend = backend
        self._chains = backend.chains

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """See `taskqueue_core.backend.Publisher.publish`."""
        keys = {task.key for task in tasks}
        for key in keys:
            demand_no_shard("key", key)
        answers: dict[int, Confirmation] = {}
        left = list(range(len(tasks)))
        if keys.isdisjoint(self._chains.sharded):
            told = await self._backend.inner.publisher.publish(*tasks)
            if not any(answer.code is Refusal.MOVED for answer in told):
                return told
            answers = dict(enumerate(told))
            left = await self._grown(
                tasks, [place for place, one in answers.items() if one.code is Refusal.MOVED]
            )
        try:
            for _ in range(_ROUNDS if left else 0):
                left = await self._round(tasks, left, answers)
                if not left:
                    break
        except BackendUnavailable as error:
            if any(answer.status is Published.ACCEPTED for answer in answers.values()):
                raise PublishUnconfirmed("the store took only a part") from error
            raise
        return tuple([answers[place] for place in range(len(tasks))])

    async def _round(
        self, tasks: Sequence[Task], places: list[int], answers: dict[int, Confirmation]
    ) -> list[int]:
        """Publish at the last generation that is known; return those whose queue has a later one."""
        by_key: dict[str, list[int]] = {}
        for place in places:
            by_key.setdefault(tasks[place].key, []).append(place)
        older = {key: chain for key in by_key if len(chain := self._chains.known(key)) > 1}
        for key, chain in older.items():
            await self._closed_before(key, chain, [tasks[place] for place in by_key[key]])
        known = await together(
            self._known(key, chain, tasks, by_key[key]) for key, chain in older.items()
        )
        homes = {place: name for some in known for place, name in some.items()}
        if homes:
            moved = await self._send(tasks, sorted(homes), homes, answers)
            places = [place for place in places if place not in homes or place in moved]
        homes = {place: self._home(tasks[place]) for place in places}
        moved = await self._send(tasks, places, homes, answers)
        return await self._grown(tasks, moved)

    async def _grown(self, tasks: Sequence[Task], moved: Sequence[int]) -> list[int]:
        """Return those of the tasks whose queues have a generation that was not known."""
        grown: dict[str, bool] = {}
        for place in moved:
            key = tasks[place].key
            if key not in grown:
                before = self._chains.known(key)
                grown[key] = await self._chains.read(key) != before
        return [place for place in moved if grown[tasks[place].key]]

    def _home(self, task: Task) -> str:
        last = self._chains.known(task.key)[-1]
        return last.place(task.key, shard_of(task, last.shards))

    async def _closed_before(
        self, key: str, chain: tuple[Generation, ...], tasks: Sequence[Task]
    ) -> None:
        """See to it that each task's shard before the last one is closed: so no two take the same id in."""
        before, last = chain[-2:]
        for shard in {shard_of(task, before.shards) for task in tasks}:
            await self._chains.demand_closed(before.place(key, shard), last)

    async def _known(
        self, key: str, chain: tuple[Generation, ...], tasks: Sequence[Task], places: list[int]
    ) -> dict[int, str]:
        """Return where, in generations before the last one, ids are known."""
        asked: dict[str, list[int]] = {}
        for generation in chain[:-1]:
            for place in places:
                name = generation.place(key, shard_of(tasks[place], generation.shards))
                asked.setdefault(name, []).append(place)
        control = self._backend.sides[0].control
        told = await together(
            control.statuses(name, *(tasks[place].id for place in some))
            for name, some in asked.items()
        )
        found: dict[int, str] = {}
        for (name, some), statuses in zip(asked.items(), told, strict=True):
            found |= {p: name for p, one in zip(some, statuses, strict=True) if one is not None}
        return found

    async def _send(
        self,
        tasks: Sequence[Task],
        places: Sequence[int],
        homes: dict[int, str],
        answers: dict[int, Confirmation],
    ) -> list[int]:
        """Publish each task where it belongs; return those that are refused there because the place is closed."""
        if not places:
            return []
        told = await self._backend.inner.publisher.publish(
            *[renamed(tasks[place], homes[place]) for place in places]
        )
        moved = []
        for place, answer in zip(places, told, strict=True):
            key = tasks[place].key
            answers[place] = answer if answer.key == key else structs.replace(answer, key=key)
            if answer.code is Refusal.MOVED:
                moved.append(place)
        return moved

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
    ) -> Confirmation:
        """See `taskqueue_core.backend.Publisher.schedule_retry`: in the shard that has the task."""
        inner = None
        if settles is not None:
            _, inner = self._backend.inward(settles)
            name = inner.task.key
        else:
            name = await self._backend.where(task) or self._home(task)
        told = await self._backend.inner.publisher.schedule_retry(
            renamed(task, name), at, error=error, token=token, settles=inner
        )
        return told if told.key == task.key else structs.replace(told, key=task.key)

    def room_bell(self, *keys: str) -> RoomBell:
        """See `taskqueue_core.capabilities.RoomBells`."""
        names = [name for key in keys for name in self._chains.known(key)[-1].places(key)]
        return JointBell([self._backend.inner], [names])
