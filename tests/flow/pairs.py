"""A migration between two memory backends, each of which can be made unavailable for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.migration import (
    MigratingBackend,
    MigrationMode,
)
from taskqueue_core.tasks import Delivery, Health, Published, Task
from taskqueue_memory import MemoryBackend

KEY = "work"


class Weak:
    """Wrapper around a backend or one of its parts: calls fail or block while the `Weakness` of its store says so."""

    def __init__(self, inner: Any, store: Weakness) -> None:
        self._inner = inner
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in {"publisher", "control", "dead_letters", "dependencies"}:
            return Weak(found, self._store)
        if name == "subscribe":
            return lambda *words: Weak(found(*words), self._store)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*words: Any, **options: Any) -> Any:
            if name == "health" and self._store.down:
                return Health(ok=False, backend="weak")
            await self._store.check()
            return await found(*words, **options)

        return call


class Weakness:
    """State of a simulated outage of one store: down (calls fail) or silent (calls get no answer)."""

    def __init__(self) -> None:
        self.down = False
        self._speaks = asyncio.Event()
        self._speaks.set()

    @property
    def silent(self) -> bool:
        """Whether calls block until the store answers again."""
        return not self._speaks.is_set()

    @silent.setter
    def silent(self, silent: bool) -> None:
        (self._speaks.clear if silent else self._speaks.set)()

    async def check(self) -> None:
        """Raise `BackendUnavailable` if the store is down; block while it is silent."""
        if self.down:
            raise BackendUnavailable("gone")
        await self._speaks.wait()


class Pair:
    """Two memory backends, and the migrating backend opened over them."""

    def __init__(self, mode: MigrationMode = MigrationMode.AVAILABLE) -> None:
        self.clock = ManualClock()
        self.old, self.new = MemoryBackend(clock=self.clock), MemoryBackend(clock=self.clock)
        self.weakness = Weakness(), Weakness()
        self.mode = mode
        self.both = self.open()

    def open(self) -> MigratingBackend:
        """Open both backends as another process would."""
        old, new = (
            Weak(backend, weakness)
            for backend, weakness in zip((self.old, self.new), self.weakness, strict=True)
        )
        return MigratingBackend(old, new, mode=self.mode, patience=0.05)

    async def publish(self, *ids: str, through: Any = None, **fields: Any) -> list[Published]:
        """Publish tasks with these ids and return the status of each."""
        tasks = [Task(key=KEY, id=name, **fields) for name in ids]
        return [one.status for one in await (through or self.both).publisher.publish(*tasks)]

    async def where(self, *ids: str) -> list[str]:
        """Return which backends know each task: "o" for the old one, "n" for the new one."""
        told = [await side.control.statuses(KEY, *ids) for side in (self.old, self.new)]
        return [("o" if old else "") + ("n" if new else "") for old, new in zip(*told, strict=True)]


@asynccontextmanager
async def pair(mode: MigrationMode = MigrationMode.AVAILABLE) -> AsyncIterator[Pair]:
    """Yield a pair of backends for a test and close it afterwards."""
    made = Pair(mode)
    yield made
    for weakness in made.weakness:
        weakness.down = weakness.silent = False
    await made.both.aclose()


async def take(subscription: Any, number: int) -> list[Delivery]:
    """Receive until the given number of deliveries has arrived."""
    found: list[Delivery] = []
    async with asyncio.timeout(5):
        while len(found) < number:
            found += (await subscription.receive(number - len(found), None)).deliveries
    return found


ACCEPTED, DUPLICATE, REFUSED = Published.ACCEPTED, Published.DUPLICATE, Published.REFUSED
