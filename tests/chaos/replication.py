"""Worlds whose Redis has a replica: one that can be cut off and promoted by hand, and one under Sentinels."""

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


class Pair(World):
    """A master and a replica, the link between them, and clients who are led to whichever is the master.

    With ``confirmed``, a publish is confirmed once the replica has it. What is confirmed while the
    replica is cut off may be lost, but then it is counted: no other loss is allowed.
    """

    def __init__(
        self, folder: Path, shape: Shape | None = None, *, confirmed: bool = False, **more: Any
    ) -> None:
        super().__init__(folder, shape, **more)
        self.confirmed = confirmed
        self.old = self.redis
        self.replica = RedisServer(find_engine(), folder / "replica")
        self.between = FaultProxy(("127.0.0.1", self.old.port))
        self.cut_at = 0.0

    async def prepare(self) -> None:
        """Have the replica follow through the link, and wait until it is in step: else a failover proves nothing."""
        await asyncio.to_thread(self.replica.start)
        await self.between.start()
        host, port = self.between.address
        await asyncio.to_thread(self.replica.call, "REPLICAOF", host, port)
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
        return await asyncio.to_thread(self._same_offset)

    def _same_offset(self) -> bool:
        theirs = self.replica.info("replication")
        return theirs.get("master_link_status") == "up" and int(theirs["slave_repl_offset"]) >= int(
            self.old.info("replication")["master_repl_offset"]
        )

    def target(self) -> Address:
        """Lead clients to the master."""
        return "127.0.0.1", self.redis.port

    async def cut_replica_off(self) -> None:
        """Let nothing more reach the replica, which must have been in step a moment ago."""
        theirs = await asyncio.to_thread(self.replica.info, "replication")
        assert theirs["master_link_status"] == "up"
        self.cut_at = time.monotonic()
        self.log.note(What.FAULT, name="cut replica", target="replica 0")
        self.between.block()

    async def fail_over(self) -> None:
        """Kill the master, promote the replica, and lead everybody there."""
        self.log.note(What.FAULT, name="fail over", target="redis 0")
        await asyncio.to_thread(self.old.kill)
        await self.between.aclose()
        await asyncio.to_thread(self.replica.call, "REPLICAOF", "NO", "ONE")
        self.redis = self.replica
        self.backend = self.open_backend(self.redis.port)
        if self.confirmed:  # there is no second replica that could confirm anything
            await self._promise(None)
        for link in self.links.values():
            link.cut()
        # An answer may have been on its way, so the span ends a little after the old master did.
        span = (self.cut_at - 0.05, time.monotonic() + 0.05)
        self.terms = msgspec.structs.replace(
            self.terms, waived=(span,), may_lose_publishes=not self.confirmed
        )
        self.log.note(What.HEALED, name="fail over", target="redis 0")

    async def close(self) -> None:
        """End both servers."""
        await super().close()
        await self.between.aclose()
        for server in (self.old, self.replica):
            await asyncio.to_thread(server.close)


class Guarded(World):
    """A master, a replica and three Sentinels, who promote the replica by themselves. Clients ask them."""

    def __init__(self, folder: Path, shape: Shape | None = None, **more: Any) -> None:
        self.sentinels = Sentinels(find_engine(), folder / "sentinels")
        super().__init__(folder, shape, redis=self.sentinels.servers[0], **more)

    async def raise_store(self) -> None:
        """Start everything, and wait until replicas are in step and every Sentinel knows all."""
        await asyncio.to_thread(self.sentinels.start)

    def open_backend(self, port: int, *, url: str = "") -> Backend:
        """Make a backend that asks the Sentinels."""
        return super().open_backend(port, url=url or self.sentinels.url)

    async def environment(self, role: str, number: int) -> dict[str, str]:
        """Lead everybody to the Sentinels, without a link."""
        return await super().environment(role, number) | {
            "TASKQUEUE_REDIS_URL": self.sentinels.url,
            "TASKQUEUE_REDIS_OPERATION_TIMEOUT": "8",
        }

    async def lose_master(self, kind: str) -> float:
        """Kill or freeze the master; return how long the Sentinels took to promote the replica."""
        begin = time.monotonic()
        self.log.note(What.FAULT, name=f"{kind} master", target="redis 0")
        (self.redis.kill if kind == "kill" else self.redis.freeze)()
        await self.until(self._promoted, "the Sentinels promote the replica")
        end = time.monotonic()
        self.log.note(What.HEALED, name=f"{kind} master", target="redis 0")
        # Replication runs behind the answers, by a little: that little may be lost.
        span = (begin - 0.3, end + 0.3)
        self.terms = msgspec.structs.replace(self.terms, waived=(span,), may_lose_publishes=True)
        return end - begin

    async def _promoted(self) -> bool:
        replica = self.sentinels.servers[1]
        told = await asyncio.to_thread(replica.info, "replication")
        return told["role"] == "master"

    async def close(self) -> None:
        """End all servers."""
        await super().close()
        await asyncio.to_thread(self.sentinels.close)
