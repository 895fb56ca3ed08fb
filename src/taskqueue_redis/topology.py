"""Which server is in charge of a key."""

from __future__ import annotations

from typing import Protocol

from taskqueue_redis.addresses import Place
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.nodes import Node

__all__ = ["Single", "Topology", "redirection"]


class Topology(Protocol):
    """Knows the servers behind one address. Owns their nodes."""

    def find(self, key: str) -> Node | None:
        """Return who is in charge of a key, as far as known; None if that is unknown or in doubt. Quick."""
        ...

    async def locate(self, key: str) -> Node:
        """Return who is in charge of a key; finds out if need be. Raises `Unreachable`."""
        ...

    async def masters(self) -> list[Node]:
        """Return all who are in charge of anything. Raises `Unreachable`."""
        ...

    def in_charge(self, place: Place) -> bool:
        """Whether a server is in charge of anything, as far as known."""
        ...

    def doubt(self, node: Node | None) -> None:
        """Take note that a node was out of reach, or said that it is not in charge."""
        ...

    def moved(self, slot: int, place: Place) -> Node:
        """Take note that a slot lives elsewhere; return where."""
        ...

    def node(self, place: Place) -> Node:
        """Return the node at a place."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class Single:
    """One server, which is in charge of everything."""

    def __init__(self, settings: RedisSettings) -> None:
        """Do no input or output."""
        self._node = Node(settings.address.places[0], settings)

    def find(self, key: str) -> Node | None:  # noqa: ARG002 - see `Topology`
        return self._node

    async def locate(self, key: str) -> Node:  # noqa: ARG002 - see `Topology`
        return self._node

    async def masters(self) -> list[Node]:
        return [self._node]

    def in_charge(self, place: Place) -> bool:
        return place == self._node.place

    def doubt(self, node: Node | None) -> None:
        """Nobody else could be asked."""

    def moved(self, slot: int, place: Place) -> Node:  # noqa: ARG002 - see `Topology`
        return self._node

    def node(self, place: Place) -> Node:  # noqa: ARG002 - see `Topology`
        return self._node

    async def aclose(self) -> None:
        await self._node.aclose()


def redirection(text: str, node: Node | None) -> tuple[int, Place]:
    """Return the slot and place that a MOVED or ASK names; one without a host means the same host."""
    _, slot, address = text.split(" ")[:3]
    host, _, port = address.rpartition(":")
    if not host and node is not None:
        host = node.place.host
    return int(slot), Place(host.strip("[]"), int(port))
