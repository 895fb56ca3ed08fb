"""Chaos runs on a Redis Cluster: masters die, slots move, and the standstill of each queue is measured."""

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
from tests.chaos.replication import complete
from tests.chaos.world import CONFIG, Outcome, Shape, World
from tests.redis.clusters import Cluster
from tests.redis.engines import Engine, find_engine
from tests.redis.servers import RedisServer

_PREFIX = "chaos"
_PARTITIONS = 8
CLUSTER_KEYS = ("beta", "epsilon", "gamma", "eta", "alpha", "mu")
"""two queues on each of three masters; all six are in different partitions"""
_LATE = 0.3
"""maximum seconds for which an answer of a master that died is in transit"""
_PAUSE = 0.01
"""seconds to wait after each step of moving a slot, as if the slot had more keys"""
_SIGNS = {
    What.PUBLISHED: frozenset({"accepted", "duplicate"}),
    What.DELIVERED: frozenset({""}),
}


class Clustered(World):
    """A run on three masters with ``replicas`` replicas each. Clients connect directly, without fault proxies.

    If a running ``cluster`` is given, it is emptied, used, and left running at the end.
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
        """Prepare the run without starting anything. ``config`` applies to every node."""
        engine = engine or find_engine()
        config = {**CONFIG, **(config or {})}
        self._borrowed = cluster is not None
        self.cluster = cluster or Cluster(
            engine, folder / "nodes", replicas=replicas, config=config
        )
        self.partitions = Partitions(_PREFIX, _PARTITIONS)
        shape = msgspec.structs.replace(shape or Shape(), keys=keys, producers=max(2, len(keys)))
        self.errors: list[str] = []
        """counters of commands that the nodes refused because their keys were in several slots; filled at the end"""
        super().__init__(folder, shape, engine=engine, redis=self.cluster.masters[0], **more)

    async def raise_store(self) -> None:
        """Start the nodes and wait until the cluster is complete; empty a cluster that runs already."""
        if self._borrowed:
            await asyncio.to_thread(self.cluster.everywhere, "FLUSHALL")
            await asyncio.to_thread(self.cluster.everywhere, "CONFIG", "RESETSTAT")
        else:
            await asyncio.to_thread(self.cluster.start)

    async def lower_store(self) -> None:
        """Stop the nodes, unless the cluster was passed in."""
        if not self._borrowed:
            await asyncio.to_thread(self.cluster.close)

    def open_backend(self, port: int, *, url: str = "") -> Backend:
        """Open a backend that discovers the cluster from any node."""
        return super().open_backend(port, url=url or self.cluster.url)

    async def environment(self, role: str, number: int) -> dict[str, str]:
        """Give every process the addresses of all nodes."""
        return await super().environment(role, number) | {"TASKQUEUE_REDIS_URL": self.cluster.url}

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Give each producer one queue, so that it never waits for another queue's node; consumers get all queues."""
        told = super().setup(role, number)
        if role == "producer":
            told["keys"] = (self.shape.keys[number % len(self.shape.keys)],)
        return told

    def owner(self, key: str) -> RedisServer:
        """Return the node that serves a queue now."""
        return self.cluster.owner(self.partitions.of(key))

    def keys_of(self, node: RedisServer) -> tuple[str, ...]:
        """Return the queues that a node serves now."""
        return tuple(key for key in self.shape.keys if self.owner(key) is node)

    def keys_but(self, node: RedisServer) -> tuple[str, ...]:
        """Return the queues that other nodes serve."""
        theirs = self.keys_of(node)
        return tuple(key for key in self.shape.keys if key not in theirs)

    def slots_of_keys(self) -> set[int]:
        """Return the slots of all keys that are stored on the masters."""
        found: set[int] = set()
        for node in self.cluster.masters:
            cursor = b"0"
            while True:
                cursor, keys = node.call("SCAN", cursor, "COUNT", 1000)
                found |= {self.cluster.slot(key) for key in keys}
                if cursor == b"0":
                    break
        return found

    def struck(self, name: str, node: RedisServer) -> float:
        """Record that a fault of a node begins; return the time."""
        return self.log.note(What.FAULT, name=name, target=self._target(node)).at

    def healed(self, name: str, node: RedisServer) -> float:
        """Record that a fault of a node is over; return the time."""
        return self.log.note(What.HEALED, name=name, target=self._target(node)).at

    def _target(self, node: RedisServer) -> str:
        return f"redis {self.cluster.nodes.index(node)}"

    async def lose_master(self, node: RedisServer) -> float:
        """Kill a master that has a replica; return the seconds until the replica has taken over.

        Replicas lag behind their master's answers, so confirmations of the last moment may be lost or undone. The terms
        of the run are adapted to that.
        """
        key = self.keys_of(node)[0]
        replicas = self.cluster.replicas[node.port]
        complete_at = min([await complete(self, node, replica) for replica in replicas])
        begin = self.struck("kill master", node)
        await asyncio.to_thread(node.kill)
        await self.until(lambda: self.owner(key) in replicas, "a replica takes over")
        end = self.healed("kill master", node)
        span = (complete_at, end + _LATE)
        self.terms = msgspec.structs.replace(
            self.terms, waived=(*self.terms.waived, span), may_lose_publishes=True
        )
        return end - begin

    async def kill_and_restart(
        self, node: RedisServer, seconds: float, *, until_down: bool = False
    ) -> None:
        """Kill a master without a replica; restart it after ``seconds``, or that long after the cluster went down."""
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
        """Move the slot of a queue to another master, ``pipeline`` keys at a time; return when it began and ended."""
        slot = self.cluster.slot(self.partitions.of(key))
        begin = self.log.note(What.FAULT, name="move slot", target=f"slot of {key}").at
        await asyncio.to_thread(self.cluster.move, slot, target, pipeline=pipeline, pause=_PAUSE)
        return begin, self.log.note(What.HEALED, name="move slot", target=f"slot of {key}").at

    async def judge(self) -> Outcome:
        """Read the nodes' error counters, then judge the run."""
        self.errors = await asyncio.to_thread(self._refused)
        return await super().judge()

    def _refused(self) -> list[str]:
        """Return the running nodes' counts of commands refused because their keys were in several slots."""
        return [
            f"{name}:{count}"
            for node in self.cluster.nodes
            if node.running
            for name, count in node.info("errorstats").items()
            if name == "errorstat_CROSSSLOT"
        ]


class Sharded(Clustered):
    """A run with one queue over all masters, divided into shards whose number may change at any time."""

    def __init__(self, folder: Path, shape: Shape | None = None, **more: Any) -> None:
        """Prepare a run with the one queue ``alpha``."""
        super().__init__(folder, shape, keys=("alpha",), **more)

    def open_backend(self, port: int, *, url: str = "") -> Backend:
        """Open a backend that supports shards."""
        return ShardedBackend(super().open_backend(port, url=url))

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Make every process use the backend that supports shards."""
        return super().setup(role, number) | {"word": "tests.chaos.programs.sharded"}

    async def spread(self, number: int) -> None:
        """Change the number of shards; return when the store has confirmed it."""
        await limit(self, "alpha", shards=number)


def standstill(
    events: Sequence[Event], keys: Sequence[str], what: What, since: float, until: float
) -> float:
    """Return the longest time between two signs of activity of these queues, from ``since`` to ``until``."""
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
