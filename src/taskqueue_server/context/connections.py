"""Who is connected: by connection id, counted per worker. Nothing here is needed for correctness; leases are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol

MAX_CONNECTIONS = 10_000
"""sockets in all"""
MAX_STRANGERS = 100
"""sockets that have not said hello"""


class Connection(Protocol):
    """A connection, as the registry needs it."""

    @property
    def connection_id(self) -> str:
        """The one name that is never shared."""
        ...

    @property
    def worker_id(self) -> str | None:
        """The identity, once it is known."""
        ...

    def forget(self, receipts: Iterable[str]) -> None:
        """Let go of receipts that move to another connection."""
        ...


class Connections:
    """The connections of this process. Removing one touches no other."""

    def __init__(
        self, max_connections: int = MAX_CONNECTIONS, max_strangers: int = MAX_STRANGERS
    ) -> None:
        """Start empty."""
        self._max_connections = max_connections
        self._max_strangers = max_strangers
        self._members: dict[str, Connection] = {}
        self._strangers: dict[str, None] = {}
        self._by_worker: dict[str, dict[str, Connection]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def has_room_for(self, *, known: bool) -> bool:
        """Whether one more may come in; strangers cannot keep out one that is ``known`` by its token."""
        return len(self._members) < self._max_connections and (
            known or len(self._strangers) < self._max_strangers
        )

    def add(self, member: Connection, *, known: bool = False) -> None:
        """Note a connection that has not said hello."""
        self._members[member.connection_id] = member
        if not known:
            self._strangers[member.connection_id] = None
        self._empty.clear()

    def identify(self, member: Connection, worker_id: str) -> None:
        """Note whose connection it is."""
        self._strangers.pop(member.connection_id, None)
        self._by_worker.setdefault(worker_id, {})[member.connection_id] = member

    def remove(self, member: Connection) -> None:
        """Forget one connection. Harmless when repeated."""
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
        """Have the worker's other connections let go of receipts that ``member`` is about to adopt."""
        wanted = tuple(receipts)
        for other in self.others(member, worker_id):
            other.forget(wanted)

    def others(self, member: Connection, worker_id: str) -> tuple[Connection, ...]:
        """Return a worker's other connections."""
        known = self._by_worker.get(worker_id, {})
        return tuple(
            connection for name, connection in known.items() if name != member.connection_id
        )

    def connections(self, worker_id: str) -> int:
        """Count a worker's connections."""
        return len(self._by_worker.get(worker_id, {}))

    @property
    def strangers(self) -> int:
        """How many have not said hello."""
        return len(self._strangers)

    def __iter__(self) -> Iterator[Connection]:
        """All connections."""
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        """Count all connections."""
        return len(self._members)

    async def empty(self) -> None:
        """Wait until nobody is connected."""
        await self._empty.wait()
