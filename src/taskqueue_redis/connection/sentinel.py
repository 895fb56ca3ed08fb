"""The topology of a master with Sentinels. They are asked for the master's address whenever it may have changed."""

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
    """The master's address according to one Sentinel. The address after the latest failover compares as greatest."""

    epoch: int
    host: str
    port: int


class SentinelTopology(NodesByPlace):
    """The topology of one master, whose address the Sentinels report. No other server is ever used as master."""

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._master: Node | None = None
        self._search = Flight(self._find_out, "ask the Sentinels")

    def find(self, key: str) -> Node | None:  # noqa: ARG002 - the only master holds every key
        return self._master

    async def locate(self, key: str) -> Node:  # noqa: ARG002 - the only master holds every key
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
        """Do nothing: only a cluster has slots."""

    async def aclose(self) -> None:
        await self._search.aclose()
        await super().aclose()

    async def _find_out(self) -> Node:
        named = max(await self._named())
        node = self.node(HostAddress(named.host, named.port))
        wire = await node.reach()
        # Sentinels may report a server that is no longer the master, so ask the server itself for its role.
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
        """Return the reports of a majority of the Sentinels, or of all that answer in time if those are fewer.

        Raises `Unreachable` if no Sentinel answers.
        """
        places = self._settings.address.hosts
        asked = [asyncio.create_task(self._ask(place)) for place in places]
        told: list[_Named] = []
        problem: Unreachable | None = None
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    told.append(await answer)
                except Unreachable as error:
                    # Prefer an error in the configuration: it helps the caller more than an unavailable Sentinel does.
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
