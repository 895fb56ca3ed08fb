"""What shards are called in the store: ``resize:s3@2x8-…`` is shard 3 of the second generation, of 8."""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

from msgspec import structs

from taskqueue_core.errors import InvalidInput
from taskqueue_core.tasks import Task

__all__ = ["FIRST", "LONGEST", "Generation", "Shard", "demand_no_shard", "renamed", "shard_of"]

_SHARD = re.compile(r"(.+):s(\d{1,3})@(\d{1,9})x(\d{1,4})-[0-9a-f]{4}")
_WORD = re.compile(r"shards@(\d{1,9})x(\d{1,4})")
_EVENLY = 48
LONGEST = 29
"""characters that the name of a shard has beyond its queue's"""


class Generation(NamedTuple):
    """The shards of a queue between two changes of their number."""

    number: int
    shards: int

    @property
    def word(self) -> str:
        """Return what is said, in the settings of the places before, of where they have moved."""
        return f"shards@{self.number}x{self.shards}"

    @classmethod
    def read(cls, word: str | None) -> Generation | None:
        """Read such a word; ``None`` if it is another."""
        parts = None if word is None else _WORD.fullmatch(word)
        return None if parts is None else cls(int(parts[1]), int(parts[2]))

    def place(self, key: str, shard: int) -> str:
        """Return the name of a shard in the store."""
        if not self.number:
            return key
        return _named(key, shard, self)

    def places(self, key: str) -> list[str]:
        """Return the names of all shards."""
        return [self.place(key, shard) for shard in range(self.shards)]


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


def demand_no_shard(field: str, key: str) -> None:
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
