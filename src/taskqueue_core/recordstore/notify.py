"""The open subscriptions and room signals of a backend, and hints that make some look-ups in the store unnecessary."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Generic, Self, TypeVar

from taskqueue_core.authoring.helpers import LocalSubscription

N = TypeVar("N", bound="LocalSubscription | RecordRoomSignal")


class ByKey(Generic[N]):
    """The open subscriptions or open room signals of a backend, grouped by key."""

    def __init__(self) -> None:
        self._by_key: dict[str, set[N]] = {}

    @property
    def keys(self) -> set[str]:
        return set(self._by_key)

    @property
    def all(self) -> set[N]:
        return set[N]().union(*self._by_key.values())

    def of(self, key: str) -> set[N]:
        return self._by_key.get(key, set())

    def add(self, opened: N) -> None:
        for key in opened.keys:
            self._by_key.setdefault(key, set()).add(opened)

    def remove(self, closed: N) -> None:
        """Remove a subscription or signal. Idempotent."""
        for key in closed.keys:
            remaining = self.of(key)
            remaining.discard(closed)
            if not remaining:
                self._by_key.pop(key, None)

    def notify(self, keys: Iterable[str]) -> None:
        for key in keys:
            for waiting in self.of(key):
                waiting.notify()


class Hints:
    """Estimates, for each key, of whether it has waiting tasks and when its next task becomes due.

    Hints make look-ups for idle keys unnecessary. A hint may cause a look-up that finds nothing, but it never hides a
    task.
    """

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        """all keys that have waiting tasks, and perhaps some keys that have none"""
        self._due: dict[str, float] = {}

    def note_due(self, key: str, at: float) -> None:
        self._due[key] = min(at, self.due(key))

    def due(self, key: str) -> float:
        """Return when the key's next task becomes due, or an earlier time; infinity if no task becomes due."""
        return self._due.get(key, math.inf)

    def nothing_due(self, key: str) -> None:
        self._due.pop(key, None)

    def forget(self, keys: Iterable[str]) -> None:
        """Discard the hints for these keys, which may be wrong, so that the keys are looked up again."""
        for key in keys:
            self.waiting.add(key)
            self._due[key] = -math.inf


class RecordRoomSignal:
    """A room signal of a `RecordBackend`. While it is open, ``signals`` notifies it."""

    def __init__(self, signals: ByKey[RecordRoomSignal], keys: tuple[str, ...]) -> None:
        self.keys = keys
        self._signals = signals
        self._rang = asyncio.Event()

    def notify(self) -> None:
        """Wake the current call of `wait`, or let the next call return at once."""
        self._rang.set()

    async def wait(self, timeout: float) -> None:
        """Wait for a notification. The timeout is measured by the event loop's clock, not by the store's clock."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._rang.wait()
        self._rang.clear()

    async def __aenter__(self) -> Self:
        self._rang.clear()
        self._signals.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._signals.remove(self)
