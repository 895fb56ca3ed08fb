"""Chaos runs on a Redis with a replica, which is promoted either by the test or by Sentinels."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Durability
from tests.chaos.history import What
from tests.chaos.proxy import Address, FaultProxy
from tests.chaos.world import Shape, World
from tests.redis.clusters import Sentinels
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer


def _in_step(master: RedisServer, replica: RedisServer, offset: int | None = None) -> bool:
    """Return whether a connected replica has reached an offset, by default that of its master now."""
    theirs = replica.info("replication")
    if offset is None:
        offset = _offset(master)
    return theirs.get("master_link_status") == "up" and int(theirs["slave_repl_offset"]) >= offset


def _offset(master: RedisServer) -> int:
    return int(master.info("replication")["master_repl_offset"])


async def complete(world: World, master: RedisServer, replica: RedisServer) -> float:
    """Return a time, as late as possible, until which the replica has all writes of its master."""
    at = time.monotonic()
    offset = await asyncio.to_thread(_offset, master)

    async def reached() -> bool:
        return await asyncio.to_thread(_in_step, master, replica, offset)

    await world.until(reached, "the replica has the writes of a moment ago")
    return at


class Pair(World):
    """A master and a replica with a breakable link between them; clients are led to the current master.

    With ``confirmed``, a publish is confirmed once the replica has it. Without it, tasks confirmed while the replica is
    cut off may be lost; such losses are counted, and no others are allowed.
    """

    def __init__(
        self, folder: Path, shape: Shape | None = None, *, confirmed: bool = False, **more: Any
    ) -> None:
        super().__init__(folder, shape, **more)
        self.confirmed = confirmed
        self.old = self.redis
        self.replica = RedisServer(find_engine(), folder / "replica")
        self.between = FaultProxy(("127.0.0.1", self.old.port))
        self.complete_at = 0.0
        """time until which the replica has every write for certain"""

    async def prepare(self) -> None:
        """Connect the replica through the link and wait until it is in sync; else a failover would prove nothing."""
        await asyncio.to_thread(self.replica.start)
        await self.between.start()
        host, port = self.between.address
        await asyncio.to_thread(self.replica.call, "REPLICAOF", host, port)
        # The backend counts the replicas when the queues are configured.
        await self.until(self._in_step, "the replica is connected")
        await super().prepare()
        if self.confirmed:
            await self._promise(Durability.REPLICATED)
        await self.until(self._in_step, "the replica is in step")

    async def _promise(self, durability: Durability | None) -> None:
        for key in self.shape.keys:
            settings = await self.control.settings(key)
            promised = settings.model_copy(update={"durability": durability})
            await self.control.configure(key, promised)

    async def _in_step(self) -> bool:
        return await asyncio.to_thread(_in_step, self.old, self.replica)

    def target(self) -> Address:
        """Return the address of the current master."""
        return "127.0.0.1", self.redis.port

    async def cut_replica_off(self) -> None:
        """Block the link to the replica, which must be connected at that moment."""
        self.complete_at = await complete(self, self.old, self.replica)
        self.log.note(What.FAULT, name="cut replica", target="replica 0")
        self.between.block()

    async def fail_over(self) -> None:
        """Kill the master, promote the replica, and redirect all clients."""
        self.log.note(What.FAULT, name="fail over", target="redis 0")
        await asyncio.to_thread(self.old.kill)
        await self.between.aclose()
        await asyncio.to_thread(self.replica.call, "REPLICAOF", "NO", "ONE")
        self.redis = self.replica
        self.backend = self.open_backend(self.redis.port)
        if self.confirmed:  # no second replica is left that could confirm publishes
            await self._promise(None)
        for link in self.links.values():
            link.cut()
        # An answer may have been in transit when the old master died, so the waived span is a little longer.
        span = (self.complete_at, time.monotonic() + 0.05)
        self.terms = msgspec.structs.replace(
            self.terms, waived=(span,), may_lose_publishes=not self.confirmed
        )
        self.log.note(What.HEALED, name="fail over", target="redis 0")

    async def close(self) -> None:
        """Close both servers and the link between them."""
        await super().close()
        await self.between.aclose()
        for server in (self.old, self.replica):
            await asyncio.to_thread(server.close)


class Guarded(World):
    """A master, a replica, and three Sentinels that promote the replica. Clients ask the Sentinels for the master."""

    def __init__(self, folder: Path, shape: Shape | None = None, **more: Any) -> None:
        self.sentinels = Sentinels(find_engine(), folder / "sentinels")
        super().__init__(folder, shape, redis=self.sentinels.servers[0], **more)

    async def raise_store(self) -> None:
        """Start all servers and wait until the replica is in sync and the Sentinels know each other."""
        await asyncio.to_thread(self.sentinels.start)

    def open_backend(self, port: int, *, url: str = "") -> Backend:
        """Open a backend that finds the master through the Sentinels."""
        return super().open_backend(port, url=url or self.sentinels.url)

    async def environment(self, role: str, number: int) -> dict[str, str]:
        """Give every process the Sentinels' addresses; they connect without fault proxies."""
        return await super().environment(role, number) | {
            "TASKQUEUE_REDIS_URL": self.sentinels.url,
            "TASKQUEUE_REDIS_OPERATION_TIMEOUT": "8",
        }

    async def lose_master(self, kind: str) -> float:
        """Kill or freeze the master; return the seconds until the Sentinels have promoted the replica."""
        complete_at = await complete(self, self.redis, self.sentinels.servers[1])
        begin = time.monotonic()
        self.log.note(What.FAULT, name=f"{kind} master", target="redis 0")
        (self.redis.kill if kind == "kill" else self.redis.freeze)()
        await self.until(self._promoted, "the Sentinels promote the replica")
        end = time.monotonic()
        self.log.note(What.HEALED, name=f"{kind} master", target="redis 0")
        # The replica lags behind the master's answers, so confirmations since then may be lost.
        span = (complete_at, end + 0.3)
        self.terms = msgspec.structs.replace(self.terms, waived=(span,), may_lose_publishes=True)
        return end - begin

    async def _promoted(self) -> bool:
        replica = self.sentinels.servers[1]
        told = await asyncio.to_thread(replica.info, "replication")
        return told["role"] == "master"

    async def close(self) -> None:
        """Close all servers."""
        await super().close()
        await asyncio.to_thread(self.sentinels.close)
