"""The topology of a Redis Cluster: which node holds which slot, according to the nodes themselves."""

from __future__ import annotations

import asyncio
import random
from binascii import crc_hqx
from functools import lru_cache
from typing import Any

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
from taskqueue_redis.connection.nodes import Node, link_closed
from taskqueue_redis.connection.topology import NodesByPlace

_SLOTS = 16_384
# Number of nodes that are asked for the slot map at the same time, in case some of them do not respond.
_AT_ONCE = 3
_PAUSE = 0.25  # minimum number of seconds between two requests for the slot map after failures


@lru_cache(4096)
def slot_of(key: str) -> int:
    """Return the cluster slot of a key. Only the text in its first pair of braces counts, unless that is empty."""
    name = key.encode()
    start = name.find(b"{")
    end = name.find(b"}", start + 1)
    if start >= 0 and end > start + 1:
        name = name[start + 1 : end]
    return crc_hqx(name, 0) % _SLOTS


class ClusterTopology(NodesByPlace):
    """The topology of a cluster with many masters. An unavailable master delays only commands for its own slots."""

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._seeds = settings.address.hosts
        self._owners: list[Node | None] = []
        self._asked_at = 0.0
        self._renewal = Flight(self._renew, "ask for the cluster's slots")

    def find(self, key: str) -> Node | None:
        return self._owners[slot_of(key)] if self._owners else None

    async def locate(self, key: str) -> Node:
        node = self.find(key)
        if node is None:
            await self._map()
            node = self.find(key)
        if node is None:
            raise Unreachable(Policy.SEEK, NotReached("no node of the cluster serves the slot"))
        return node

    async def masters(self) -> list[Node]:
        if not self._owners or self._renewal.under_way:
            await self._map()
        return list({node.place: node for node in self._owners if node is not None}.values())

    def in_charge(self, place: HostAddress) -> bool:
        return any(node is not None and node.place == place for node in self._owners)

    def doubt(self, node: Node | None) -> None:  # noqa: ARG002 - the new slot map covers every node
        now = asyncio.get_running_loop().time()
        if now - self._asked_at >= _PAUSE:
            self._asked_at = now
            self._renewal.start()

    def moved(self, slot: int, place: HostAddress) -> None:
        node = self.node(place)
        if self._owners:
            self._owners[slot] = node
        self.doubt(node)

    async def aclose(self) -> None:
        await self._renewal.aclose()
        await super().aclose()

    async def _map(self) -> None:
        if await self._renewal.join() is None:
            raise link_closed()

    async def _renew(self) -> bool:
        self._asked_at = asyncio.get_running_loop().time()
        masters = list({node for node in self._owners if node is not None})
        others = [node for node in self.nodes() if node not in masters]
        seeds = [node for place in self._seeds if (node := self.node(place)) not in masters]
        candidates = [*_shuffled(masters), *_shuffled(list({*others, *seeds}))]
        problem: Unreachable | None = None
        for start in range(0, len(candidates), _AT_ONCE):
            try:
                node, told = await _first([_ask(node) for node in candidates[start:][:_AT_ONCE]])
            except Unreachable as error:
                problem = problem or error
            else:
                self._learn(node, told)
                return True
        raise problem or Unreachable(Policy.SEEK, NotReached("no node of the cluster is known"))

    def _learn(self, asked: Node, told: list[Any]) -> None:
        owners: list[Node | None] = [None] * _SLOTS
        known = set(self._seeds)
        for first, last, *servers in told:
            places = [_place(server, asked) for server in servers]
            known.update(place for place in places if place is not None)
            if places[0] is not None:
                owners[first : last + 1] = [self.node(places[0])] * (last + 1 - first)
        for place in known:
            # Also create nodes for the replicas, which can be asked for the slot map if no master responds.
            self.node(place)
        self._owners = owners
        self.keep(known)


async def _ask(node: Node) -> tuple[Node, list[Any]]:
    try:
        wire = await node.reach()
        told = await wire.call("CLUSTER", "SLOTS")
    except (Lost, ErrorReply) as error:
        raise Unreachable(*judge_connecting(error)) from None
    if not told:
        raise Unreachable(Policy.SEEK, NotReached(f"{node.place} knows no slots (yet)"))
    return node, told


async def _first(asked: list[Any]) -> tuple[Node, list[Any]]:
    """Return the first successful answer and cancel the other requests; raise `Unreachable` if all have failed."""
    tasks = [asyncio.ensure_future(question) for question in asked]
    problem: Unreachable | None = None
    try:
        for answer in asyncio.as_completed(tasks):
            try:
                told: tuple[Node, list[Any]] = await answer
            except Unreachable as error:
                problem = problem or error
            else:
                return told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise problem or Unreachable(Policy.SEEK, NotReached("no node is known"))


def _place(server: list[Any], asked: Node) -> HostAddress | None:
    host, port = (server[0] or b"").decode(), int(server[1])
    if host == "?":
        return None  # Redis reports "?" for a node whose host name is not configured
    return HostAddress(host or asked.place.host, port)


def _shuffled(nodes: list[Node]) -> list[Node]:
    random.shuffle(nodes)
    return nodes
