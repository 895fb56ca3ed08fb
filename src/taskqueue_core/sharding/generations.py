"""The generations of sharded queues: the sets of shards that a queue has had, one after another.

They are read from the store, where the settings of each closed shard name the generation that replaces it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import KeysView
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

from taskqueue_core.capabilities import Control, QueueSettings
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import InvalidInput
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.shard_guard import GENERATION
from taskqueue_core.tasks import Task

_SHARD = re.compile(r"(.+):s(\d{1,3})@(\d{1,9})x(\d{1,4})-[0-9a-f]{4}")
_EVENLY = 48
LONGEST = 29
"""maximum number of characters that the name of a shard has in addition to the name of its queue"""


class Generation(NamedTuple):
    """The shards of a queue between two changes of their number."""

    number: int
    shards: int

    @property
    def moved_to(self) -> str:
        """The value of ``moved_to`` in the settings of the shards that this generation replaces."""
        return f"shards@{self.number}x{self.shards}"

    @classmethod
    def read(cls, name: str | None) -> Generation | None:
        """Parse the setting ``moved_to``; return ``None`` if it does not name a generation."""
        parts = None if name is None else GENERATION.fullmatch(name)
        return None if parts is None else cls(int(parts[1]), int(parts[2]))

    def shard_key(self, key: str, shard: int) -> str:
        """Return the key under which the store keeps a shard of the queue ``key``."""
        if not self.number:
            return key
        return _named(key, shard, self)

    def shard_keys(self, key: str) -> list[str]:
        return [self.shard_key(key, shard) for shard in range(self.shards)]


FIRST = Generation(0, 1)
"""the generation of a queue whose number of shards was never changed: one shard, named like the queue"""


class Shard(NamedTuple):
    """A shard, as described by its name in the store."""

    key: str
    shard: int
    generation: Generation

    @classmethod
    def read(cls, name: str) -> Shard | None:
        """Parse the name of a shard; return ``None`` for the name of a queue."""
        parts = _SHARD.fullmatch(name) if "@" in name else None
        if parts is None:
            return None
        return cls(parts[1], int(parts[2]), Generation(int(parts[3]), int(parts[4])))


def reject_shard_name(field: str, key: str) -> None:
    """Raise `InvalidInput` if ``key`` is the name of a shard, not of a queue."""
    if Shard.read(key) is not None:
        raise InvalidInput(field, "the name of a shard", "only names of queues")


def shard_of(task: Task, shards: int) -> int:
    """Return the number of a task's shard. Tasks with the same ordering key or unique key are in the same shard."""
    unique = None if task.unique is None else task.unique.key
    return number_of(task.ordering_key or unique or task.id, shards)


def number_of(name: str, shards: int) -> int:
    """Return the number of the shard that a name falls to."""
    if shards == 1:
        return 0
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) % shards


@lru_cache(maxsize=16_384)
def _named(key: str, shard: int, generation: Generation) -> str:
    # Some stores, for example Redis Cluster, choose the partition by a checksum of the name. The salt at the end of the
    # name gives consecutive shards consecutive checksums, so that the shards are spread evenly over any number of
    # partitions that divides _EVENLY.
    name = f"{key}:s{shard}@{generation.number}x{generation.shards}"
    wanted = (crc32(key.encode()) + shard) % _EVENLY
    for salt in range(0x10000):
        salted = f"{name}-{salt:04x}"
        if crc32(salted.encode()) % _EVENLY == wanted:
            return salted
    return f"{name}-0000"


REMEMBERED = 2.0
"""seconds for which the known generations are assumed to be complete; after a refused publish, they are read at once"""


class ShardGenerations:
    """The generations of all queues that this process knows. Shards are never reopened, so no generation is removed."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._known: dict[str, tuple[Generation, ...]] = {}
        self._looked_at = -REMEMBERED
        self._looking = asyncio.Lock()
        self._closed: set[str] = set()

    @property
    def sharded(self) -> KeysView[str]:
        """The queues whose number of shards was changed, as far as this process knows."""
        return self._known.keys()

    def known(self, key: str) -> tuple[Generation, ...]:
        """Return the generations of a queue that this process knows, oldest first."""
        return self._known.get(key, (FIRST,))

    async def refresh(self) -> None:
        """Find out which queues other processes have sharded. Reads the list of queues at most once every 2 seconds."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now < self._looked_at + REMEMBERED:
                return
            names = await self._control.queues()
            self._looked_at = now
            shards = [shard for name in names if (shard := Shard.read(name)) is not None]
            newer = [s for s in shards if s.generation.number > self.known(s.key)[-1].number]
            await gather_all(self.read(key) for key in {shard.key for shard in newer})

    async def read(self, key: str) -> tuple[Generation, ...]:
        """Read the generations of a queue from its settings; return them oldest first."""
        chain = self.known(key)
        while True:
            last = chain[-1].shard_key(key, 0)
            following = Generation.read((await self._control.settings(last)).moved_to)
            if following is None:
                break
            self._closed.add(last)
            chain = (*chain, following)
        if len(chain) > len(self.known(key)):
            self._known[key] = chain
        return self.known(key)

    async def demand_closed(self, position: str, following: Generation) -> None:
        """Close a shard to new tasks, unless this process knows that it is already closed."""
        if position not in self._closed:
            await self.close(position, following)

    async def close(self, position: str, following: Generation) -> Generation:
        """Close a shard for good. Return the generation that replaces it, which another process may have chosen."""

        def edit(settings: QueueSettings) -> QueueSettings:
            if Generation.read(settings.moved_to) is not None:
                return settings
            return settings.model_copy(update={"moved_to": following.moved_to})

        settings = await change_settings(self._control, position, edit)
        self._closed.add(position)
        return Generation.read(settings.moved_to) or following

    async def succeed(self, key: str, shards: int, settings: QueueSettings) -> None:
        """Replace the last generation of a queue with a generation of ``shards`` shards.

        If several processes do this at once, the first process to close shard 0 decides the next generation.
        """
        while (chain := await self.read(key))[-1].shards != shards:
            last, following = chain[-1], Generation(chain[-1].number + 1, shards)
            await self.copy(key, settings, following)
            following = await self.close(last.shard_key(key, 0), following)
            await self.close_all(key, last, following)

    async def close_all(self, key: str, generation: Generation, following: Generation) -> None:
        await gather_all(self.demand_closed(name, following) for name in generation.shard_keys(key))

    async def copy(self, key: str, settings: QueueSettings, *generations: Generation) -> None:
        """Copy a queue's settings to all shards of these generations.

        Each shard keeps its own version, and its own ``moved_to`` if a later generation has replaced it.
        """
        await gather_all(
            self._copy(name, settings)
            for generation in generations
            for name in generation.shard_keys(key)
        )

    async def _copy(self, position: str, settings: QueueSettings) -> None:
        moved = settings.moved_to if Generation.read(settings.moved_to) is None else None

        def edit(result: QueueSettings) -> QueueSettings:
            kept = moved if Generation.read(result.moved_to) is None else result.moved_to
            own = {"version": result.version, "shards": 1, "moved_to": kept}
            return settings.model_copy(update=own)

        written = await change_settings(self._control, position, edit)
        # Store even the default settings, so that the shard is in the list of queues, where other processes find it.
        if not written.version:
            await self._control.configure(position, written)
