"""The ``schedules`` of sharded queues: all instants of a schedule are published to the shard that its name falls to."""

from __future__ import annotations

from collections.abc import Sequence

from taskqueue_core.capabilities import StoredSchedule
from taskqueue_core.composite.backend import CompositeBackend, QueuePart
from taskqueue_core.composite.schedules import JointSchedules
from taskqueue_core.sharding.generations import ShardGenerations, number_of, reject_shard_name


class ShardedSchedules(JointSchedules):
    """Implementation of `Schedules` for sharded queues. Schedules of other queues are passed on unchanged."""

    def __init__(self, composite: CompositeBackend, generations: ShardGenerations) -> None:
        super().__init__(composite)
        self._generations = generations

    async def put(
        self, schedule: StoredSchedule, *, version: int | None = None, keep_next: bool = False
    ) -> StoredSchedule:
        reject_shard_name("key", schedule.key)
        return await super().put(schedule, version=version, keep_next=keep_next)

    async def _parts(self, key: str, name: str) -> Sequence[QueuePart]:
        await self._generations.refresh()
        return [
            QueuePart(0, generation.shard_key(key, number_of(name, generation.shards)))
            for generation in self._generations.known(key)
        ]

    async def _close(self, part: QueuePart, key: str) -> None:
        *_, last = await self._generations.read(key)
        await self._generations.demand_closed(part.key, last)

    async def _refused(self, key: str) -> None:
        await self._generations.read(key)
