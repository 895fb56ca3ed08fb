"""The backend for sharded queues, which are spread over several partitions of one store."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from math import gcd

from msgspec import structs

from taskqueue_core.authoring.helpers import checked_keys
from taskqueue_core.backend import Backend
from taskqueue_core.composite.backend import (
    CompositeBackend,
    Member,
    QueuePart,
    ReceivePlan,
    renamed,
)
from taskqueue_core.composite.dependencies import JointDependencies
from taskqueue_core.composite.listing import JointListing
from taskqueue_core.composite.streams import JointStreams
from taskqueue_core.concurrency import gather_all
from taskqueue_core.limits import check_name
from taskqueue_core.shard_guard import MARKER
from taskqueue_core.sharding.control import ShardedControl
from taskqueue_core.sharding.generations import (
    FIRST,
    REMEMBERED,
    Generation,
    Shard,
    ShardGenerations,
    reject_shard_name,
)
from taskqueue_core.sharding.publisher import ShardedPublisher
from taskqueue_core.sharding.schedules import ShardedSchedules
from taskqueue_core.sharding.subscription import ShardedSubscription
from taskqueue_core.tasks import Delivery, Health

_MARK = re.compile(r"<s(\d{1,3})@(\d{1,9})x(\d{1,4})>")
_POLL_SECONDS = 0.1
"""seconds between checks of whether an older shard is drained"""


class ShardedBackend(CompositeBackend):
    """A `Backend` that adds the setting ``shards`` to another backend, and passes on calls for unsharded queues."""

    def __init__(self, inner: Backend) -> None:
        """Take ownership of ``inner``, which must support ``control``."""
        self.inner = inner
        super().__init__(Member("store", inner, needed=True))
        self.generations = ShardGenerations(self.members[0].control)
        self.publisher = ShardedPublisher(self, self.generations)
        self.control = ShardedControl(self, self.generations)
        self._drained: set[str] = set()

    @property
    def dependencies(self) -> JointDependencies:
        """The lines between shards and queues. Raises `CapabilityMissing` unless the store supports them."""
        return JointDependencies(self)

    @property
    def listing(self) -> JointListing:
        """The lists of all queues. Raises `CapabilityMissing` unless the store supports them."""
        return JointListing(self)

    @property
    def schedules(self) -> ShardedSchedules:
        """The schedules of all queues. Raises `CapabilityMissing` unless the store supports them."""
        return ShardedSchedules(self, self.generations)

    @property
    def streams(self) -> JointStreams:
        """The events of all tasks. Raises `CapabilityMissing` unless all members support them."""
        return JointStreams(self)

    def subscribe(self, keys: Iterable[str], consumer: str) -> ShardedSubscription:
        check_name("consumer", consumer)
        unique = checked_keys(keys)
        for key in unique:
            reject_shard_name("keys", key)
        return ShardedSubscription(self, unique, consumer)

    async def health(self) -> Health:
        return await self.inner.health()

    async def parts(self, key: str) -> Sequence[QueuePart]:
        await self.generations.refresh()
        return self._parts(key)

    async def current_parts(self, key: str) -> Sequence[QueuePart]:
        await self.generations.read(key)
        return self._parts(key)

    def _parts(self, key: str) -> Sequence[QueuePart]:
        chain = self.generations.known(key)
        return [QueuePart(0, name) for generation in chain for name in generation.shard_keys(key)]

    def public_key(self, part: QueuePart) -> str | None:
        shard = Shard.read(part.key)
        if shard is None:
            return None if part.key == MARKER else part.key
        return shard.key

    def first_plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return the first shard of each queue; the other shards are added once the settings have been read."""
        return ReceivePlan(tuple(QueuePart(0, key) for key in keys), 0)

    async def plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return the shards that may deliver now. A shard waits until the older shards that precede it are drained."""
        await self.generations.refresh()
        sharded = [key for key in keys if self.generations.known(key) != (FIRST,)]
        matches = await gather_all(self._open(key) for key in sharded)
        held = any(shard is None for shards in matches for shard in shards)
        parts = [QueuePart(0, key) for key in keys]
        parts += [QueuePart(0, name) for names in matches for name in names if name is not None]
        return ReceivePlan(tuple(parts), _POLL_SECONDS if held else REMEMBERED)

    async def _open(self, key: str) -> list[str | None]:
        """Return the shards of later generations that may deliver now. The list contains ``None`` if some must wait."""
        chain = self.generations.known(key)
        names: list[str | None] = []
        before: list[bool] = [await self._is_drained(FIRST.shard_key(key, 0), chain[1])]
        for index, (earlier, generation) in enumerate(itertools.pairwise(chain), 1):
            passed = [
                all(before[number] for number in related(shard, earlier, generation))
                for shard in range(generation.shards)
            ]
            open_ = [generation.shard_key(key, shard) for shard, may in enumerate(passed) if may]
            names += open_
            if len(open_) < generation.shards:
                names.append(None)
            if generation is not chain[-1]:
                shards, following = generation.shard_keys(key), chain[index + 1]
                empty = await gather_all(self._is_drained(name, following) for name in shards)
                before = [may and is_empty for may, is_empty in zip(passed, empty, strict=True)]
        return names

    async def _is_drained(self, position: str, following: Generation) -> bool:
        """Return whether a shard has no tasks left that must be delivered before the tasks of later shards.

        Close the shard first: a process that was killed may have left it open, and an open shard can get tasks.
        """
        if position not in self._drained:
            await self.generations.demand_closed(position, following)
            stats = await self.members[0].control.stats(position)
            # Scheduled tasks need not be delivered first, unless some of them may be retries.
            retries = stats.ledger.scheduled if stats.retried else 0
            if not (stats.ledger.waiting or stats.ledger.in_flight or retries):
                self._drained.add(position)
        return position in self._drained

    def from_member(self, member: int, delivery: Delivery) -> Delivery:  # noqa: ARG002 - there is only one member
        """Replace the shard's name with the name of its queue, and prefix the receipt with the shard."""
        shard = Shard.read(delivery.task.key)
        if shard is None:
            return delivery
        number, shards = shard.generation
        return structs.replace(
            delivery,
            task=renamed(delivery.task, shard.key),
            receipt=f"<s{shard.shard}@{number}x{shards}>{delivery.receipt}",
            shard=shard.shard if shards > 1 else None,
        )

    def origins(self, receipt: str, key: str) -> Sequence[tuple[QueuePart, str]]:
        """Return the shard that issued a receipt, and the receipt without the prefix that names the shard."""
        parts = _MARK.match(receipt) if receipt.startswith("<") else None
        if parts is None:
            return [(QueuePart(0, key), receipt)]
        if key:
            key = Generation(int(parts[2]), int(parts[3])).shard_key(key, int(parts[1]))
        return [(QueuePart(0, key), receipt[parts.end() :])]


def related(shard: int, before: Generation, after: Generation) -> Iterable[int]:
    """Return the shards in ``before`` from which ids or ordering keys may have moved to ``shard`` in ``after``."""
    step = gcd(before.shards, after.shards)
    return range(shard % step, before.shards, step)
