"""Publishing to sharded queues: ids are looked up in older generations; the last generation accepts all other tasks."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import RoomSignal
from taskqueue_core.composite.backend import CombinedSignal, CompositeBackend
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.sharding.generations import (
    Generation,
    ShardGenerations,
    reject_shard_name,
    renamed,
    shard_of,
)
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, Task

_ROUNDS = 5


class ShardedPublisher:
    """Implementation of `Publisher` for sharded queues. Tasks of queues without shards are passed on unchanged."""

    def __init__(
        self, composite: CompositeBackend, inner: Backend, generations: ShardGenerations
    ) -> None:
        self._composite = composite
        self._inner = inner
        self._generations = generations

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        keys = {task.key for task in tasks}
        for key in keys:
            reject_shard_name("key", key)
        answers: dict[int, Confirmation] = {}
        remaining = list(range(len(tasks)))
        if keys.isdisjoint(self._generations.sharded):
            confirmations = await self._inner.publisher.publish(*tasks)
            if not any(answer.code is Refusal.MOVED for answer in confirmations):
                return confirmations
            answers = dict(enumerate(confirmations))
            remaining = await self._grown(
                tasks, [index for index, item in answers.items() if item.code is Refusal.MOVED]
            )
        try:
            for _ in range(_ROUNDS if remaining else 0):
                remaining = await self._round(tasks, remaining, answers)
                if not remaining:
                    break
        except BackendUnavailable as error:
            if any(answer.status is Published.ACCEPTED for answer in answers.values()):
                raise PublishUnconfirmed("the store accepted only part of the batch") from error
            raise
        return tuple([answers[index] for index in range(len(tasks))])

    async def _round(
        self, tasks: Sequence[Task], indexes: list[int], answers: dict[int, Confirmation]
    ) -> list[int]:
        """Publish to the last known generation; return the indexes of tasks whose queue has a newer generation."""
        by_key: dict[str, list[int]] = {}
        for index in indexes:
            by_key.setdefault(tasks[index].key, []).append(index)
        older = {key: chain for key in by_key if len(chain := self._generations.known(key)) > 1}
        for key, chain in older.items():
            await self._closed_before(key, chain, [tasks[index] for index in by_key[key]])
        known = await gather_all(
            self._known(key, chain, tasks, by_key[key]) for key, chain in older.items()
        )
        targets = {index: name for batch in known for index, name in batch.items()}
        if targets:
            moved = await self._send(tasks, sorted(targets), targets, answers)
            indexes = [index for index in indexes if index not in targets or index in moved]
        targets = {index: self._shard_key(tasks[index]) for index in indexes}
        moved = await self._send(tasks, indexes, targets, answers)
        return await self._grown(tasks, moved)

    async def _grown(self, tasks: Sequence[Task], moved: Sequence[int]) -> list[int]:
        """Return the indexes of the tasks whose queue has a generation that this process did not know."""
        grown: dict[str, bool] = {}
        for index in moved:
            key = tasks[index].key
            if key not in grown:
                before = self._generations.known(key)
                grown[key] = await self._generations.read(key) != before
        return [index for index in moved if grown[tasks[index].key]]

    def _shard_key(self, task: Task) -> str:
        last = self._generations.known(task.key)[-1]
        return last.shard_key(task.key, shard_of(task, last.shards))

    async def _closed_before(
        self, key: str, chain: tuple[Generation, ...], tasks: Sequence[Task]
    ) -> None:
        """Close each task's shard of the previous generation, so that no two shards accept the same id."""
        before, last = chain[-2:]
        for shard in {shard_of(task, before.shards) for task in tasks}:
            await self._generations.demand_closed(before.shard_key(key, shard), last)

    async def _known(
        self, key: str, chain: tuple[Generation, ...], tasks: Sequence[Task], indexes: list[int]
    ) -> dict[int, str]:
        """Return the tasks whose ids an older generation knows: their indexes, mapped to the key of the shard."""
        requested: dict[str, list[int]] = {}
        for generation in chain[:-1]:
            for index in indexes:
                name = generation.shard_key(key, shard_of(tasks[index], generation.shards))
                requested.setdefault(name, []).append(index)
        control = self._composite.members[0].control
        results = await gather_all(
            control.statuses(name, *(tasks[index].id for index in batch))
            for name, batch in requested.items()
        )
        matches: dict[int, str] = {}
        for (name, batch), statuses in zip(requested.items(), results, strict=True):
            matches |= {
                p: name for p, status in zip(batch, statuses, strict=True) if status is not None
            }
        return matches

    async def _send(
        self,
        tasks: Sequence[Task],
        indexes: Sequence[int],
        targets: dict[int, str],
        answers: dict[int, Confirmation],
    ) -> list[int]:
        """Publish each task to its target; return the indexes of those refused because the target is closed."""
        if not indexes:
            return []
        confirmations = await self._inner.publisher.publish(
            *[renamed(tasks[index], targets[index]) for index in indexes]
        )
        moved = []
        for index, answer in zip(indexes, confirmations, strict=True):
            key = tasks[index].key
            answers[index] = answer if answer.key == key else structs.replace(answer, key=key)
            if answer.code is Refusal.MOVED:
                moved.append(index)
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
        """Schedule the next attempt in the shard that has the task."""
        inner = None
        if settles is not None:
            _, inner = self._composite.to_member(settles)
            name = inner.task.key
        else:
            name = await self._generations.where(task) or self._shard_key(task)
        confirmation = await self._inner.publisher.schedule_retry(
            renamed(task, name), at, error=error, token=token, settles=inner
        )
        return (
            confirmation
            if confirmation.key == task.key
            else structs.replace(confirmation, key=task.key)
        )

    def room_signal(self, *keys: str) -> RoomSignal:
        names = [name for key in keys for name in self._generations.known(key)[-1].shard_keys(key)]
        return CombinedSignal([self._inner], [names])
