"""The generations of sharded queues, read from the settings in the store: a closed shard names the next one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import KeysView
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

from msgspec import structs

from taskqueue_core.capabilities import Control, QueueSettings
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import InvalidInput
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.shard_guard import GENERATION
from taskqueue_core.tasks import Task

_SHARD = re.compile(r"(.+):s(\d{1,3})@(\d{1,9})x(\d{1,4})-[0-9a-f]{4}")
_EVENLY = 48
LONGEST = 29
"""characters that the name of a shard has beyond its queue's"""


class Generation(NamedTuple):
    """The shards of a queue between two changes of their number."""

    number: int
    shards: int

    @property
    def moved_to(self) -> str:
        """Return what is said, in the settings of the places before, of where they have moved."""
        return f"shards@{self.number}x{self.shards}"

    @classmethod
    def read(cls, name: str | None) -> Generation | None:
        """Read such a word; ``None`` if it is another."""
        parts = None if name is None else GENERATION.fullmatch(name)
        return None if parts is None else cls(int(parts[1]), int(parts[2]))

    def shard_key(self, key: str, shard: int) -> str:
        """Return the name of a shard in the store."""
        if not self.number:
            return key
        return _named(key, shard, self)

    def shard_keys(self, key: str) -> list[str]:
        """Return the names of all shards."""
        return [self.shard_key(key, shard) for shard in range(self.shards)]


FIRST = Generation(0, 1)
"""a queue whose number of shards was never changed is called as it is"""


class Shard(NamedTuple):
    """What the name of a shard says."""

    key: str
    shard: int
    generation: Generation

    @classmethod
    def read(cls, name: str) -> Shard | None:
        """Read the name of a shard; ``None`` for that of a queue."""
        parts = _SHARD.fullmatch(name) if "@" in name else None
        if parts is None:
            return None
        return cls(parts[1], int(parts[2]), Generation(int(parts[3]), int(parts[4])))


def reject_shard_name(field: str, key: str) -> None:
    """Raise `InvalidInput` for what is the name of a shard, and not of a queue."""
    if Shard.read(key) is not None:
        raise InvalidInput(field, "the name of a shard", "names of queues")


def shard_of(task: Task, shards: int) -> int:
    """Return the shard of a task: tasks of one entity have the same one."""
    if shards == 1:
        return 0
    name = task.ordering_key or task.id
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) % shards


@lru_cache(maxsize=16_384)
def _named(key: str, shard: int, generation: Generation) -> str:
    # Where a store chooses the partition by a checksum of the name, as the cluster of Redis does, neighbours shall have
    # neighbouring ones: so that shards are spread evenly over any number of partitions that divides this.
    name = f"{key}:s{shard}@{generation.number}x{generation.shards}"
    wanted = (crc32(key.encode()) + shard) % _EVENLY
    for salt in range(0x10000):
        salted = f"{name}-{salt:04x}"
        if crc32(salted.encode()) % _EVENLY == wanted:
            return salted
    return f"{name}-0000"


def renamed(task: Task, key: str) -> Task:
    """Return a task as that of another queue. Its fields were checked when it was made, and are not again."""
    if task.key == key:
        return task
    copy: Task = task.__copy__()  # type: ignore[attr-defined] # msgspec has it, untyped
    structs.force_setattr(copy, "key", key)
    return copy


REMEMBERED = 2.0
"""seconds for which a chain is taken for complete; a refused publish reads it again at once"""
_SHARD_FIELDS = ("version", "moved_to", "shards")


class ShardGenerations:
    """What this process knows of them. Places are closed for good, so a chain only grows."""

    def __init__(self, control: Control) -> None:
        """Read through ``control``."""
        self._control = control
        self._known: dict[str, tuple[Generation, ...]] = {}
        self._looked_at = -REMEMBERED
        self._looking = asyncio.Lock()
        self._closed: set[str] = set()

    @property
    def sharded(self) -> KeysView[str]:
        """The queues whose number of shards was changed, as far as this process has heard."""
        return self._known.keys()

    def known(self, key: str) -> tuple[Generation, ...]:
        """Return the generations of a queue that this process has heard of, the oldest first."""
        return self._known.get(key, (FIRST,))

    async def refresh(self) -> None:
        """Learn what other processes have sharded, with one call for all queues every two seconds."""
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now < self._looked_at + REMEMBERED:
                return
            names = await self._control.queues()
            self._looked_at = now
            behind: set[str] = set()
            for name in names:
                shard = Shard.read(name)
                if shard is not None and shard.generation.number > self.known(shard.key)[-1].number:
                    behind.add(shard.key)
            await gather_all(self.read(key) for key in behind)

    async def where(self, task: Task) -> str | None:
        """Return the shard that has a task, or had it last."""
        chain = await self.read(task.key)
        if len(chain) == 1:
            return None
        names = [name for generation in chain for name in generation.shard_keys(task.key)]
        statuses = await gather_all(self._control.statuses(name, task.id) for name in names)
        results = [
            (status, name)
            for name, (status,) in zip(names, statuses, strict=True)
            if status is not None
        ]
        best = max(results, key=lambda pair: (pair[0].state.live, pair[0].updated_at), default=None)
        return best and best[1]

    async def read(self, key: str) -> tuple[Generation, ...]:
        """Read the generations of a queue from the settings."""
        chain = self.known(key)
        while following := await self.after(chain[-1].shard_key(key, 0)):
            chain = (*chain, following)
        if len(chain) > len(self.known(key)):
            self._known[key] = chain
        return self.known(key)

    async def after(self, position: str) -> Generation | None:
        """Return the generation that follows a place that is closed."""
        following = Generation.read((await self._control.settings(position)).moved_to)
        if following is not None:
            self._closed.add(position)
        return following

    async def demand_closed(self, position: str, following: Generation) -> None:
        """See to it that a place of the generation before takes nothing in any more."""
        if position not in self._closed:
            await self.close(position, following)

    async def close(self, position: str, following: Generation) -> Generation:
        """Close a shard for good; return the generation that follows, which another process may have chosen."""

        def edit(settings: QueueSettings) -> QueueSettings:
            if Generation.read(settings.moved_to) is not None:
                return settings
            return settings.model_copy(update={"moved_to": following.moved_to})

        settings = await change_settings(self._control, position, edit)
        self._closed.add(position)
        return Generation.read(settings.moved_to) or following

    async def succeed(self, key: str, shards: int, settings: QueueSettings) -> None:
        """Have a queue go on with another number of shards.

        The first shard of the present ones is closed first: it decides what follows for all processes that try this.
        """
        while (chain := await self.read(key))[-1].shards != shards:
            last, following = chain[-1], Generation(chain[-1].number + 1, shards)
            await gather_all(
                self.copy(name, settings, following) for name in following.shard_keys(key)
            )
            following = await self.close(last.shard_key(key, 0), following)
            await self.close_all(key, last, following)

    async def close_all(self, key: str, generation: Generation, following: Generation) -> None:
        """Close every shard of a generation."""
        await gather_all(self.demand_closed(name, following) for name in generation.shard_keys(key))

    async def copy(self, position: str, settings: QueueSettings, generation: Generation) -> None:
        """Give a shard the settings of its queue; its version and what follows it are its own."""
        moved = settings.moved_to if Generation.read(settings.moved_to) is None else None

        def edit(result: QueueSettings) -> QueueSettings:
            closed = Generation.read(result.moved_to) is not None
            own: dict[str, object] = {"version": result.version, "shards": 1}
            own["moved_to"] = result.moved_to if closed else moved
            return settings.model_copy(update=own)

        assert generation.number  # noqa: S101 - the first one is the queue itself
        await change_settings(self._control, position, edit)
        if not (
            await self._control.settings(position)
        ).version:  # so that others find it by its name
            await self._control.configure(position, settings.model_copy(update={
                "version": 0, "shards": 1, "moved_to": moved,
            }))  # fmt: skip
