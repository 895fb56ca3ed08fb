"""Publishing to sharded queues. A task known to an older generation goes there, others to the newest."""

from __future__ import annotations

from collections.abc import Sequence

from taskqueue_core.capabilities import RoomSignal
from taskqueue_core.composite.backend import CompositeBackend, QueuePart
from taskqueue_core.composite.publisher import JointPublisher, by_key
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import InvalidInput
from taskqueue_core.sharding.generations import ShardGenerations, reject_shard_name, shard_of
from taskqueue_core.tasks import Confirmation, Task


class ShardedPublisher(JointPublisher):
    """Implementation of `Publisher` for sharded queues. Tasks of other queues are passed on unchanged."""

    moving = "the number of shards is being changed"

    def __init__(self, composite: CompositeBackend, generations: ShardGenerations) -> None:
        super().__init__(composite)
        self._generations = generations

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        for key in {task.key for task in tasks}:
            reject_shard_name("key", key)
        for task in tasks:
            if task.after is not None:
                for parent in task.after.tasks:
                    reject_shard_name("after.tasks", parent.key)
            if task.batch is not None:
                reject_shard_name("batch", task.batch.key)
            if task.unique is not None and task.ordering_key is not None:
                await self._demand_one_shard(task)
        return await super().publish(*tasks)

    async def _demand_one_shard(self, task: Task) -> None:
        """Raise `InvalidInput` if the queue of a task with a unique key and an ordering key has several shards."""
        if (await self._generations.read(task.key))[-1].shards > 1:
            raise InvalidInput(
                "unique",
                "a unique key and an ordering key",
                "only one of them, because each of them decides the shard, and the queue has several",
            )

    async def _round(
        self, tasks: Sequence[Task], indexes: list[int], answers: dict[int, Confirmation]
    ) -> list[int]:
        known = await self._known(tasks, indexes)
        moved = await self._send(tasks, known, answers)
        fresh = [index for index in indexes if index not in known or index in moved]
        fresh = await self._not_held(tasks, fresh, answers)
        targets = {index: await self._open_part(tasks[index]) for index in fresh}
        refused = await self._send(tasks, targets, answers)
        for key in by_key(tasks, refused):
            await self._generations.read(key)
        # Compare parts: another call may have learnt of the new shards since this one chose the target.
        return [index for index in refused if await self._open_part(tasks[index]) != targets[index]]

    async def _not_held(
        self, tasks: Sequence[Task], indexes: list[int], answers: dict[int, Confirmation]
    ) -> list[int]:
        """Answer the tasks whose unique keys are held in older generations; return the indexes of the others.

        The shards there are closed, so they refuse a task whose key no task of theirs holds.
        """
        asked = [
            index
            for index in indexes
            if tasks[index].unique is not None
            and len(self._generations.known(tasks[index].key)) > 1
        ]
        newest: dict[str, list[int]] = {}
        for index in asked:
            newest.setdefault((await self._open_part(tasks[index])).key, []).append(index)
        known = await self._with_known_ids(tasks, newest)  # these get the answer of their id there
        unique = by_key(tasks, [index for index in asked if index not in known])
        chains = {key: self._generations.known(key)[:-1] for key in unique}
        for number in range(max(map(len, chains.values()), default=0)):
            targets: dict[int, QueuePart] = {}
            for key, chain in chains.items():
                for index in unique.get(key, ()) if number < len(chain) else ():
                    shard = shard_of(tasks[index], chain[number].shards)
                    targets[index] = QueuePart(0, chain[number].shard_key(key, shard))
            refused = await self._send_to_holders(tasks, targets, answers)
            answered = targets.keys() - set(refused)
            indexes = [index for index in indexes if index not in answered]
            unique = {
                key: [index for index in those if index not in answered]
                for key, those in unique.items()
            }
        return indexes

    async def _known(self, tasks: Sequence[Task], indexes: list[int]) -> dict[int, QueuePart]:
        """Return the indexes of tasks whose ids an older generation knows, each mapped to the shard with the task."""
        requested: dict[str, list[int]] = {}
        for key, batch in by_key(tasks, indexes).items():
            *older, last = self._generations.known(key)
            for generation in older:
                for index in batch:
                    name = generation.shard_key(key, shard_of(tasks[index], generation.shards))
                    requested.setdefault(name, []).append(index)
                    # Close the shard of the previous generation, so that no two shards accept the same id.
                    if generation is older[-1]:
                        await self._generations.demand_closed(name, last)
        return await self._with_known_ids(tasks, requested)

    async def _with_known_ids(
        self, tasks: Sequence[Task], requested: dict[str, list[int]]
    ) -> dict[int, QueuePart]:
        """Return the indexes of the tasks whose ids a shard knows, with that shard. ``requested``: them, by shard."""
        control = self._composite.members[0].control
        results = await gather_all(
            control.statuses(name, *(tasks[index].id for index in batch))
            for name, batch in requested.items()
        )
        return {
            index: QueuePart(0, name)
            for (name, batch), statuses in zip(requested.items(), results, strict=True)
            for index, status in zip(batch, statuses, strict=True)
            if status is not None
        }

    async def _part_of(self, task: Task) -> QueuePart:
        chain = await self._generations.read(task.key)
        return await (super()._part_of(task) if len(chain) > 1 else self._open_part(task))

    async def _open_part(self, task: Task) -> QueuePart:
        last = self._generations.known(task.key)[-1]
        return QueuePart(0, last.shard_key(task.key, shard_of(task, last.shards)))

    def room_signal(self, *keys: str) -> RoomSignal:
        names = [name for key in keys for name in self._generations.known(key)[-1].shard_keys(key)]
        return super().room_signal(*names)
