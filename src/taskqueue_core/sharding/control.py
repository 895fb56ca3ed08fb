"""The ``control`` of sharded queues: settings apply to all shards, and changing ``shards`` changes their number."""

from __future__ import annotations

import itertools

from taskqueue_core.capabilities import DeletedQueue, QueueSettings
from taskqueue_core.composite.backend import CompositeBackend
from taskqueue_core.composite.control import JointControl
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.shard_guard import write_marker
from taskqueue_core.sharding.generations import (
    LONGEST,
    Generation,
    ShardGenerations,
    reject_shard_name,
)

_REPAIRED = 10
"""maximum number of sharded queues that one maintenance pass checks"""


class ShardedControl(JointControl):
    """The ``control`` of sharded queues. A queue's settings are stored in its first shard, and copied to the others."""

    def __init__(self, composite: CompositeBackend, generations: ShardGenerations) -> None:
        super().__init__(composite)
        self._generations = generations
        self._inner = composite.members[0].control

    async def settings(self, key: str) -> QueueSettings:
        settings = self._outside(await self._inner.settings(key))
        if Generation.read(settings.moved_to) is None:
            return settings
        last = (await self._generations.read(key))[-1]
        end = await self._inner.settings(last.shard_key(key, 0))
        moved = None if Generation.read(end.moved_to) else end.moved_to
        return settings.model_copy(update={"shards": last.shards, "moved_to": moved})

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """Replace the settings of a queue, and return the new settings once every shard has them."""
        check_name("key", key)
        reject_shard_name("key", key)
        first = await self._inner.settings(key)
        whole = Generation.read(first.moved_to) is None
        requested, settings = settings, await self._inside(settings)
        if settings.shards == 1 and whole:
            return self._outside(await self._inner.configure(key, settings))
        first.followed_by(settings)
        self._check(key, settings)
        last = (await self._generations.read(key))[-1]
        if settings.shards != last.shards:
            await self._demand_no_copies(key)
        moved_to = first.moved_to
        await write_marker(self._inner)
        if whole:
            following = Generation(1, settings.shards)
            moved_to = following.moved_to
            await self._generations.copy(key, settings, following)
        retained = {"shards": 1, "moved_to": moved_to}
        # This call checks the version: if several processes change the settings at once, only one of them succeeds.
        results = await self._inner.configure(key, settings.model_copy(update=retained))
        settings = settings.model_copy(update={"version": results.version})
        await self._generations.copy(key, settings, *(await self._generations.read(key))[1:])
        await self._generations.succeed(key, settings.shards, settings)
        self._composite.refresh_plans()
        return requested.model_copy(update={"version": results.version})

    async def delete(self, key: str) -> DeletedQueue:
        """Delete a queue. Raises `InvalidInput` if its number of shards was ever changed.

        Other processes never forget the shards of such a queue, so deleting it is not safe.
        """
        if len(await self._generations.read(key)) > 1:
            raise InvalidInput(
                "key",
                "a queue whose number of shards was changed",
                "queues whose number of shards was never changed",
            )
        return await super().delete(key)

    async def _inside(self, settings: QueueSettings) -> QueueSettings:
        """Replace the queues in ``bound_to`` with their shards. Raises `InvalidInput` if a queue has several shards."""
        names: list[str] = []
        for other in settings.bound_to:
            last = (await self._generations.read(other))[-1]
            if last.shards > 1:
                raise InvalidInput(
                    "bound_to", "a queue with several shards", "only queues with one shard"
                )
            names.append(last.shard_key(other, 0))
        return settings.model_copy(update={"bound_to": tuple(names)}) if names else settings

    def _outside(self, settings: QueueSettings) -> QueueSettings:
        """Replace the shards in ``bound_to`` with the names of their queues."""
        if not settings.bound_to:
            return settings
        names = [self._composite.public_name(0, name) for name in settings.bound_to]
        return settings.model_copy(update={"bound_to": tuple(names)})

    def _check(self, key: str, settings: QueueSettings) -> None:
        if settings.of_the_whole and settings.shards > 1:
            name = settings.of_the_whole[0]
            raise InvalidInput(
                "shards",
                "more than 1",
                f"only 1, as a queue with the setting {name} cannot have shards",
            )
        most = LIMITS.name - LONGEST
        if len(key) > most:
            allowed = f"only 1, because the name of a sharded queue has at most {most} characters"
            raise InvalidInput("shards", "more than 1", allowed)

    async def _demand_no_copies(self, key: str) -> None:
        for other in await self._inner.queues():
            if key in self._outside(await self._inner.settings(other)).bound_to:
                raise InvalidInput(
                    "shards", "more than 1", f"only 1, because {other!r} is bound to this queue"
                )

    async def _repair(self) -> None:
        """Complete interrupted changes of the number of shards."""
        generations = self._generations
        await generations.refresh()
        for key in self._next_keys(sorted(generations.sharded), _REPAIRED):
            chain = await generations.read(key)
            for generation, following in itertools.pairwise(chain):
                await generations.close_all(key, generation, following)
            settings = await self._inside(await self.settings(key))
            await generations.copy(key, settings, *chain[1:])
