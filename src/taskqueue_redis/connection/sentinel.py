"""A master that Sentinels watch over: they are asked who it is, and again whenever that is in doubt."""

from __future__ import annotations

import asyncio

import msgspec

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.background import Flight
from taskqueue_redis.connection.failures import (
    ErrorReply,
    Lost,
    NotReached,
    Policy,
    Unreachable,
    judge_connecting,
)
from taskqueue_redis.connection.nodes import Node, connect, link_closed
from taskqueue_redis.connection.topology import NodesByPlace


class _Named(msgspec.Struct, frozen=True, order=True):
    """A master, as one Sentinel names it; the one of the latest failover is the greatest."""

    epoch: int
    host: str
    port: int


class SentinelTopology(NodesByPlace):
    """One master, which may be another one tomorrow. Without an answer of a Sentinel nobody is trusted to be it."""

    def __init__(self, settings: RedisSettings) -> None:
        """Do no input or output."""
        super().__init__(settings)
        self._settings = settings
        self._master: Node | None = None
        self._search = Flight(self._find_out, "ask the Sentinels")

    def find(self, key: str) -> Node | None:  # noqa: ARG002 - it has all keys
        return self._master

    async def locate(self, key: str) -> Node:  # noqa: ARG002 - it has all keys
        node = self._master or await self._search.join()
        if node is None:
            raise link_closed()
        return node

    async def masters(self) -> list[Node]:
        return [await self.locate("")]

    def in_charge(self, place: HostAddress) -> bool:
        return self._master is None or self._master.place == place

    def doubt(self, node: Node | None) -> None:
        if node is self._master:
            self._master = None

    def moved(self, slot: int, place: HostAddress) -> None:
        """There are no slots here."""

    async def aclose(self) -> None:
        await self._search.aclose()
        await super().aclose()

    async def _find_out(self) -> Node:
        named = max(await self._named())
        node = self.node(HostAddress(named.host, named.port))
        wire = await node.reach()
        # A master that was demoted, or is about to be promoted, says so itself; Sentinels may lag behind.
        try:
            role = await wire.call("ROLE")
        except (Lost, ErrorReply) as error:
            raise Unreachable(*judge_connecting(error)) from None
        if role[0] != b"master":
            raise Unreachable(Policy.SEEK, NotReached(f"{node.place} is not the master (yet)"))
        self._master = node
        self.keep({node.place})
        return node

    async def _named(self) -> list[_Named]:
        """Return what most Sentinels say, or as many as answer in time. Raises `Unreachable` if none does."""
        places = self._settings.address.hosts
        asked = [asyncio.create_task(self._ask(place)) for place in places]
        told: list[_Named] = []
        problem: Unreachable | None = None
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    told.append(await answer)
                except Unreachable as error:
                    # That a Sentinel does not know the service says more than that another cannot be reached.
                    if problem is None or error.policy is Policy.REPAIR:
                        problem = error
                if len(told) > len(places) // 2:
                    break
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not told:
            raise problem or Unreachable(Policy.SEEK, NotReached("no Sentinel answers"))
        return told

    async def _ask(self, place: HostAddress) -> _Named:
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                wire = await connect(place, self._settings, sentinel=True)
                try:
                    told = await wire.call("SENTINEL", "MASTER", self._settings.address.service)
                finally:
                    await wire.aclose()
        except (Lost, ErrorReply, TimeoutError) as error:
            raise Unreachable(*judge_connecting(error)) from None
        facts = dict(zip(told[::2], told[1::2], strict=True))
        epoch, host, port = facts[b"config-epoch"], facts[b"ip"], facts[b"port"]
        return _Named(int(epoch), host.decode(), int(port))
