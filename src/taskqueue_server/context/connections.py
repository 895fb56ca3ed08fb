"""Registry of open connections, by connection id and by worker id. Leases, not this registry, prevent lost tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol

MAX_CONNECTIONS = 10_000
"""maximum number of open sockets of one server process"""
MAX_STRANGERS = 100
"""maximum number of open sockets without a hello if clients do not authenticate"""


class Connection(Protocol):
    """The interface that the registry needs from a connection."""

    connection_id: str
    worker_id: str | None
    """the worker's id, or ``None`` before the worker has sent it"""

    def forget(self, receipts: Iterable[str]) -> None:
        """Drop receipts of deliveries that move to another connection of the same worker."""
        ...


class Connections:
    """The open connections of this process."""

    def __init__(
        self, max_connections: int = MAX_CONNECTIONS, max_strangers: int = MAX_STRANGERS
    ) -> None:
        self._max_connections = max_connections
        self._max_strangers = max_strangers
        self._members: dict[str, Connection] = {}
        self._strangers: dict[str, None] = {}
        self._by_worker: dict[str, dict[str, Connection]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def has_room_for(self, *, known: bool) -> bool:
        """Return whether one more connection is allowed. Clients that are not ``known`` have a lower limit."""
        return len(self._members) < self._max_connections and (
            known or len(self._strangers) < self._max_strangers
        )

    def add(self, member: Connection, *, known: bool = False) -> None:
        """Add a connection that has not sent a hello yet. ``known`` means that its client has authenticated."""
        self._members[member.connection_id] = member
        if not known:
            self._strangers[member.connection_id] = None
        self._empty.clear()

    def identify(self, member: Connection, worker_id: str) -> None:
        """Record the worker to which the connection belongs."""
        self._strangers.pop(member.connection_id, None)
        self._by_worker.setdefault(worker_id, {})[member.connection_id] = member

    def remove(self, member: Connection) -> None:
        """Remove a connection. Idempotent."""
        self._members.pop(member.connection_id, None)
        self._strangers.pop(member.connection_id, None)
        if member.worker_id is not None:
            others = self._by_worker.get(member.worker_id, {})
            others.pop(member.connection_id, None)
            if not others:
                self._by_worker.pop(member.worker_id, None)
        if not self._members:
            self._empty.set()

    def claim(self, member: Connection, worker_id: str, receipts: Iterable[str]) -> None:
        """Make the worker's other connections drop the receipts that ``member`` is about to adopt."""
        moving = tuple(receipts)
        for other in self.others(member, worker_id):
            other.forget(moving)

    def others(self, member: Connection, worker_id: str) -> tuple[Connection, ...]:
        """Return the worker's connections except ``member``."""
        known = self._by_worker.get(worker_id, {})
        return tuple(
            connection for name, connection in known.items() if name != member.connection_id
        )

    def connections(self, worker_id: str) -> int:
        """Return the number of connections of the worker."""
        return len(self._by_worker.get(worker_id, {}))

    @property
    def strangers(self) -> int:
        """The number of connections that have neither authenticated nor sent a hello."""
        return len(self._strangers)

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    async def empty(self) -> None:
        """Wait until all connections are closed."""
        await self._empty.wait()
