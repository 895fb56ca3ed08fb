"""A world on a Redis Cluster: masters that die, slots that move, and how long each queue stood still meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_redis.scripts.runner import Partitions
from tests.chaos.history import Event, What
from tests.chaos.limiting import limit
from tests.chaos.world import CONFIG, Outcome, Shape, World
from tests.redis.clusters import Cluster
from tests.redis.engines import Engine, find_engine
from tests.redis.servers import RedisServer

_PREFIX = "chaos"
_PARTITIONS = 8
CLUSTER_KEYS = ("beta", "epsilon", "gamma", "eta", "alpha", "mu")
"""two queues on each of three masters, all in partitions of their own"""
_LATE = 0.3
"""replication runs behind the answers by less"""
_PAUSE = 0.01
"""after each step of a slot that moves: as if there were more to move"""
_SIGNS = {
    What.PUBLISHED: frozenset({"accepted", "duplicate"}),
    What.DELIVERED: frozenset({""}),
}


class Clustered(World):
    """Three masters, each with ``replicas`` replicas. Clients find their way by themselves, without links.

    A ``cluster`` that runs already is emptied and used in place of one of its own, and runs on afterwards.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape | None = None,
        *,
        replicas: int = 0,
        config: Mapping[str, str] | None = None,
        engine: Engine | None = None,
        keys: tuple[str, ...] = CLUSTER_KEYS,
        cluster: Cluster | None = None,
        **more: Any,
    ) -> None:
        """Start nothing yet. ``config`` goes to every node."""
        engine = engine or find_engine()
        config = {**CONFIG, **(config or {})}
        self._borrowed = cluster is not None
        self.cluster = cluster or Cluster(
            engine, folder / "nodes", replicas=replicas, config=config
        )
        self.partitions = Partitions(_PREFIX, _PARTITIONS)
        shape = msgspec.structs.replace(shape or Shape(), keys=keys, producers=max(2, len(keys)))
        self.errors: list[str] = []
        """what the nodes say at the end of commands whose keys were not in one slot"""
        super().__init__(folder, shape, engine=engine, redis=self.cluster.masters[0], **more)

    # The stage

    async def raise_store(self) -> None:
        """Start the nodes, and wait until all of them are well and in step; or empty those that run."""
        if self._borrowed:
            await asyncio.to_thread(self.cluster.everywhere, "FLUSHALL")
            await asyncio.to_thread(self.cluster.everywhere, "CONFIG", "RESETSTAT")
        else:
            await asyncio.to_thread(self.cluster.start)

    async def lower_store(self) -> None:
        """End the nodes, if they are this one's."""
        if not self._borrowed:
            await asyncio.to_thread(self.cluster.close)

    def open_backend(self, port: int, *, url: str = "") -> Backend:
        """Make a backend that finds its way in the cluster."""
        return super().open_backend(port, url=url or self.cluster.url)

    async def environment(self, role: str, number: int) -> dict[str, str]:
        """Lead everybody to the cluster, by all nodes."""
        return await super().environment(role, number) | {"TASKQUEUE_REDIS_URL": self.cluster.url}

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Each producer has a queue of its own, so that none waits for another one's node; consumers have all."""
        told = super().setup(role, number)
        if role == "producer":
            told["keys"] = (self.shape.keys[number % len(self.shape.keys)],)
        return told

    # Who has what

    def owner(self, key: str) -> RedisServer:
        """Return the node that has a queue now."""
        return self.cluster.owner(self.partitions.of(key))

    def keys_of(self, node: RedisServer) -> tuple[str, ...]:
        """Return the queues that a node has now."""
        return tuple(key for key in self.shape.keys if self.owner(key) is node)

    def keys_but(self, node: RedisServer) -> tuple[str, ...]:
        """Return the queues that other nodes have."""
        theirs = self.keys_of(node)
        return tuple(key for key in self.shape.keys if key not in theirs)

    def slots_of_keys(self) -> set[int]:
        """Return the slots of all keys there are, as the nodes have them."""
        found: set[int] = set()
        for node in self.cluster.masters:
            cursor = b"0"
            while True:
                cursor, keys = node.call("SCAN", cursor, "COUNT", 1000)
                found |= {self.cluster.slot(key) for key in keys}
                if cursor == b"0":
                    break
        return found

    # Faults

    def struck(self, name: str, node: RedisServer) -> float:
        """Note that a fault of a node begins; return when."""
        return self.log.note(What.FAULT, name=name, target=self._target(node)).at

    def healed(self, name: str, node: RedisServer) -> float:
        """Note that it is over; return when."""
        return self.log.note(What.HEALED, name=name, target=self._target(node)).at

    def _target(self, node: RedisServer) -> str:
        return f"redis {self.cluster.nodes.index(node)}"

    async def lose_master(self, node: RedisServer) -> float:
        """Kill a master that has a replica, and wait until that has taken over; return the seconds this took.

        Replication runs behind the answers, so what was answered just before may be lost or undone.
        """
        key = self.keys_of(node)[0]
        begin = self.struck("kill master", node)
        await asyncio.to_thread(node.kill)
        replicas = self.cluster.replicas[node.port]
        await self.until(lambda: self.owner(key) in replicas, "a replica takes over")
        end = self.healed("kill master", node)
        span = (begin - _LATE, end + _LATE)
        self.terms = msgspec.structs.replace(
            self.terms, waived=(*self.terms.waived, span), may_lose_publishes=True
        )
        return end - begin

    async def kill_and_restart(
        self, node: RedisServer, seconds: float, *, until_down: bool = False
    ) -> None:
        """Kill a master that has no replica; start it again a while after (``until_down``) the cluster went down."""
        self.struck("kill master", node)
        await asyncio.to_thread(node.kill)
        if until_down:
            await asyncio.to_thread(self.cluster.wait_down)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(node.start)
        await self.until(node.whole, "its append-only file is whole")
        await asyncio.to_thread(self.cluster.wait_ready)
        self.healed("kill master", node)

    async def move(
        self, key: str, target: RedisServer, *, pipeline: int = 1
    ) -> tuple[float, float]:
        """Move the slot of a queue to another master, so many keys at a time; return from when to when."""
        slot = self.cluster.slot(self.partitions.of(key))
        begin = self.log.note(What.FAULT, name="move slot", target=f"slot of {key}").at
        await asyncio.to_thread(self.cluster.move, slot, target, pipeline=pipeline, pause=_PAUSE)
        return begin, self.log.note(What.HEALED, name="move slot", target=f"slot of {key}").at

    async def judge(self) -> Outcome:
        """Ask the nodes, too, what they refused."""
        self.errors = await asyncio.to_thread(self._refused)
        return await super().judge()

    def _refused(self) -> list[str]:
        """Return what running nodes count of commands whose keys were in several slots, or in none of theirs."""
        return [
            f"{name}:{count}"
            for node in self.cluster.nodes
            if node.running
            for name, count in node.info("errorstats").items()
            if name == "errorstat_CROSSSLOT"
        ]


class Sharded(Clustered):
    """One queue over all masters, in as many shards as an operator says, who may change that at any time."""

    def __init__(self, folder: Path, shape: Shape | None = None, **more: Any) -> None:
        """Start nothing yet."""
        super().__init__(folder, shape, keys=("alpha",), **more)

    def open_backend(self, port: int, *, url: str = "") -> Backend:
        """Make a backend that has shards."""
        return ShardedBackend(super().open_backend(port, url=url))

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Everybody has shards."""
        return super().setup(role, number) | {"word": "tests.chaos.programs.sharded"}

    async def spread(self, number: int) -> None:
        """Change the number of shards, until that is confirmed."""
        await limit(self, "alpha", shards=number)


def standstill(
    events: Sequence[Event], keys: Sequence[str], what: What, since: float, until: float
) -> float:
    """Return the longest time, between two times, in which none of these queues gave a sign."""
    good = _SIGNS[what]
    times = sorted(
        event.at
        for event in events
        if event.what is what and event.key in keys and event.outcome in good
    )
    before = max((at for at in times if at <= since), default=since)
    after = min((at for at in times if at >= until), default=math.inf)
    inside = [at for at in times if since < at < until]
    return max(later - earlier for earlier, later in pairwise([before, *inside, after]))
