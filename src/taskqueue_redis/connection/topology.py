"""Finding the Redis server that holds a key. The base class is for a single server, which holds every key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.connection.background import SingleFlight
from taskqueue_redis.connection.connector import Connector
from taskqueue_redis.connection.failures import NotReached, Policy, Unreachable
from taskqueue_redis.connection.nodes import Node, link_closed


class Topology:
    """The servers behind one address: which of them are masters, and which master holds which key."""

    def __init__(self, connector: Connector) -> None:
        self.reopened: Callable[[], None] | None = None
        """called whenever the connection to a server has been replaced by a new one"""
        self.connector = connector
        self._nodes: dict[HostAddress, Node] = {}
        self._master: Node | None = None
        self._discovery: SingleFlight[Any] = SingleFlight(self._discover, "find the servers")

    def find(self, key: str) -> Node | None:  # noqa: ARG002 - the only master holds every key
        """Return the master that holds a key, without any request; None if it is unknown or may have changed."""
        return self._master

    async def locate(self, key: str) -> Node:
        """Return the master that holds a key; ask the servers if it is unknown. Raises `Unreachable`."""
        node = self.find(key)
        if node is None:
            await self._find_out()
            node = self.find(key)
        if node is None:
            raise Unreachable(Policy.SEEK, NotReached("no server is known that holds the key"))
        return node

    async def masters(self) -> list[Node]:
        """Return all masters; ask the servers if they are unknown. Raises `Unreachable`."""
        return [await self.locate("")]

    def in_charge(self, place: HostAddress) -> bool:
        """Return whether the server at ``place`` is a master, as far as this process knows."""
        return self._master is None or self._master.place == place

    def doubt(self, node: Node | None) -> None:
        """Record that a node did not answer or said that it is not the master, so the topology is checked again."""

    def moved(self, slot: int, place: HostAddress) -> None:
        """Record that another server, at ``place``, now holds a slot of the cluster."""

    def node(self, place: HostAddress) -> Node:
        """Return the node at an address; create it if it is new."""
        if place not in self._nodes:
            self._nodes[place] = Node(place, self.connector, self._node_reopened)
        return self._nodes[place]

    def keep(self, places: set[HostAddress]) -> None:
        """Drop the nodes that are not at ``places``, except nodes with a pending answer or a lent connection."""
        for place, node in list(self._nodes.items()):
            if place not in places and not node.in_use:
                del self._nodes[place]
                node.retire()

    def redirection(self, text: str, node: Node | None) -> tuple[int, HostAddress]:
        """Return the slot and the address in a MOVED or ASK error. An empty host means the host of ``node``."""
        _, slot, address = text.split(" ")[:3]
        host, _, port = address.rpartition(":")
        if not host and node is not None:
            host = node.place.host
        return int(slot), HostAddress(*self.connector.remap((host.strip("[]"), int(port))))

    async def aclose(self) -> None:
        """Close every connection."""
        await self._discovery.aclose()
        for node in list(self._nodes.values()):
            await node.aclose()
        await self.connector.aclose()

    async def _discover(self) -> bool:
        """Ask the servers for the topology. Raises `Unreachable`."""
        self._master = self.node(self.connector.settings.address.hosts[0])
        return True

    async def _find_out(self) -> None:
        if await self._discovery.join() is None:
            raise link_closed()

    def _node_reopened(self) -> None:
        if self.reopened is not None:
            self.reopened()
