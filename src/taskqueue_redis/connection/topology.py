"""Finding the Redis server that holds a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.nodes import Node


class Topology(Protocol):
    """The servers behind one address: which of them are masters, and which master holds which key."""

    reopened: Callable[[], None] | None
    """called whenever the connection to a server has been replaced by a new one"""

    def find(self, key: str) -> Node | None:
        """Return the master that holds a key, without any request; None if it is unknown or may have changed."""
        ...

    async def locate(self, key: str) -> Node:
        """Return the master that holds a key; ask the servers if it is unknown. Raises `Unreachable`."""
        ...

    async def masters(self) -> list[Node]:
        """Return all masters; ask the servers if they are unknown. Raises `Unreachable`."""
        ...

    def in_charge(self, place: HostAddress) -> bool:
        """Return whether the server at ``place`` is a master, as far as this process knows."""
        ...

    def doubt(self, node: Node | None) -> None:
        """Record that a node did not answer or said that it is not the master, so the topology is checked again."""
        ...

    def moved(self, slot: int, place: HostAddress) -> None:
        """Record that another server, at ``place``, now holds a slot of the cluster."""
        ...

    def node(self, place: HostAddress) -> Node:
        """Return the node at an address; create it if it is new."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class NodesByPlace:
    """The nodes of an installation by address, each created when it is first requested."""

    def __init__(self, settings: RedisSettings) -> None:
        self.reopened: Callable[[], None] | None = None
        self._settings = settings
        self._nodes: dict[HostAddress, Node] = {}

    def node(self, place: HostAddress) -> Node:
        """Return the node at an address; create it if it is new."""
        if place not in self._nodes:
            self._nodes[place] = Node(place, self._settings, self._node_reopened)
        return self._nodes[place]

    def _node_reopened(self) -> None:
        if self.reopened is not None:
            self.reopened()

    def nodes(self) -> list[Node]:
        """Return every node that was requested and not dropped since."""
        return list(self._nodes.values())

    def keep(self, places: set[HostAddress]) -> None:
        """Drop the nodes at all other addresses, except nodes with a pending answer or a lent connection."""
        for place, node in list(self._nodes.items()):
            if place not in places and not node.in_use:
                del self._nodes[place]
                node.retire()

    async def aclose(self) -> None:
        """Close every connection."""
        for node in self.nodes():
            await node.aclose()


class Single(NodesByPlace):
    """The topology of a single server, which holds every key."""

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._only = self.node(settings.address.hosts[0])

    def find(self, key: str) -> Node | None:  # noqa: ARG002 - the only server holds every key
        return self._only

    async def locate(self, key: str) -> Node:  # noqa: ARG002 - the only server holds every key
        return self._only

    async def masters(self) -> list[Node]:
        return [self._only]

    def in_charge(self, place: HostAddress) -> bool:
        return place == self._only.place

    def doubt(self, node: Node | None) -> None:
        """Do nothing: there is no other server to ask."""

    def moved(self, slot: int, place: HostAddress) -> None:
        """Do nothing: only a cluster has slots."""


def redirection(text: str, node: Node | None) -> tuple[int, HostAddress]:
    """Return the slot and the address in a MOVED or ASK error; an address without a host means the host of ``node``."""
    _, slot, address = text.split(" ")[:3]
    host, _, port = address.rpartition(":")
    if not host and node is not None:
        host = node.place.host
    return int(slot), HostAddress(host.strip("[]"), int(port))
