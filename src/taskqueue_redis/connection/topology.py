"""Which server is in charge of a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.nodes import Node


class Topology(Protocol):
    """Knows the servers behind one address. Owns their nodes."""

    reopened: Callable[[], None] | None
    """called when a node is connected to another time"""

    def find(self, key: str) -> Node | None:
        """Return who is in charge of a key, as far as known; None if that is unknown or in doubt. Quick."""
        ...

    async def locate(self, key: str) -> Node:
        """Return who is in charge of a key; finds out if need be. Raises `Unreachable`."""
        ...

    async def masters(self) -> list[Node]:
        """Return all who are in charge of anything. Raises `Unreachable`."""
        ...

    def in_charge(self, place: HostAddress) -> bool:
        """Whether a server is in charge of anything, as far as known."""
        ...

    def doubt(self, node: Node | None) -> None:
        """Take note that a node was out of reach, or said that it is not in charge."""
        ...

    def moved(self, slot: int, place: HostAddress) -> None:
        """Take note that a slot lives elsewhere."""
        ...

    def node(self, place: HostAddress) -> Node:
        """Return the node at a place."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class NodesByPlace:
    """The nodes of an installation, each made when it is first heard of."""

    def __init__(self, settings: RedisSettings) -> None:
        """Do no input or output."""
        self.reopened: Callable[[], None] | None = None
        self._settings = settings
        self._nodes: dict[HostAddress, Node] = {}

    def node(self, place: HostAddress) -> Node:
        """Return the node at a place."""
        if place not in self._nodes:
            self._nodes[place] = Node(place, self._settings, self._node_reopened)
        return self._nodes[place]

    def _node_reopened(self) -> None:
        if self.reopened is not None:
            self.reopened()

    def nodes(self) -> list[Node]:
        """Return every node that is known."""
        return list(self._nodes.values())

    def keep(self, places: set[HostAddress]) -> None:
        """Forget the nodes elsewhere, unless somebody waits for them still."""
        for place, node in list(self._nodes.items()):
            if place not in places and not node.in_use:
                del self._nodes[place]
                node.retire()

    async def aclose(self) -> None:
        """Close every connection."""
        for node in self.nodes():
            await node.aclose()


class Single(NodesByPlace):
    """One server, which is in charge of everything."""

    def __init__(self, settings: RedisSettings) -> None:
        """Do no input or output."""
        super().__init__(settings)
        self._only = self.node(settings.address.hosts[0])

    def find(self, key: str) -> Node | None:  # noqa: ARG002 - it has all keys
        return self._only

    async def locate(self, key: str) -> Node:  # noqa: ARG002 - it has all keys
        return self._only

    async def masters(self) -> list[Node]:
        return [self._only]

    def in_charge(self, place: HostAddress) -> bool:
        return place == self._only.place

    def doubt(self, node: Node | None) -> None:
        """Nobody else could be asked."""

    def moved(self, slot: int, place: HostAddress) -> None:
        """There are no slots here."""


def redirection(text: str, node: Node | None) -> tuple[int, HostAddress]:
    """Return the slot and place that a MOVED or ASK names; one without a host means the same host."""
    _, slot, address = text.split(" ")[:3]
    host, _, port = address.rpartition(":")
    if not host and node is not None:
        host = node.place.host
    return int(slot), HostAddress(host.strip("[]"), int(port))
