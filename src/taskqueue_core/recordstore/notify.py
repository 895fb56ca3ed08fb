"""The open subscriptions and room signals of a backend, and hints that save look-ups in the store."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

from taskqueue_core.authoring.helpers import LocalSubscription


class OpenSubscriptions:
    """The open subscriptions of a backend, by key."""

    def __init__(self) -> None:
        self._by_key: dict[str, set[LocalSubscription]] = {}

    @property
    def keys(self) -> set[str]:
        """The keys with at least one open subscription."""
        return set(self._by_key)

    @property
    def all(self) -> set[LocalSubscription]:
        """All open subscriptions."""
        return set[LocalSubscription]().union(*self._by_key.values())

    def of(self, key: str) -> set[LocalSubscription]:
        """Return the open subscriptions of a key."""
        return self._by_key.get(key, set())

    def add(self, subscription: LocalSubscription) -> None:
        """Add a subscription that was opened."""
        for key in subscription.keys:
            self._by_key.setdefault(key, set()).add(subscription)

    def remove(self, subscription: LocalSubscription) -> None:
        """Remove a subscription that was closed. Idempotent."""
        for key in subscription.keys:
            here = self.of(key)
            here.discard(subscription)
            if not here:
                self._by_key.pop(key, None)


class Hints:
    """Estimates for each key: whether it has waiting tasks, and when its next task becomes due.

    They avoid look-ups for idle keys. A hint may be wrong only in one direction, which costs a look-up without a
    result.
    """

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        """all keys with waiting tasks, and perhaps some keys without"""
        self._due: dict[str, float] = {}

    def note_due(self, key: str, at: float) -> None:
        """Record that a task of the key becomes due at the time ``at``."""
        self._due[key] = min(at, self.due(key))

    def due(self, key: str) -> float:
        """Return a time, perhaps too early, at which the key's next task becomes due; infinity if it has none."""
        return self._due.get(key, math.inf)

    def nothing_due(self, key: str) -> None:
        """Record that no task of the key becomes due."""
        self._due.pop(key, None)

    def forget(self, keys: Iterable[str]) -> None:
        """Discard the hints for keys, because a step was rolled back or the store was opened: look-ups are needed."""
        for key in keys:
            self.waiting.add(key)
            self._due[key] = -math.inf


class RecordRoomNotifier:
    """The open room signals of a backend, by key."""

    def __init__(self) -> None:
        self._by_key: dict[str, set[RecordRoomSignal]] = {}

    def add(self, signal: RecordRoomSignal) -> None:
        """Add a signal that was opened."""
        for key in signal.keys:
            self._by_key.setdefault(key, set()).add(signal)

    def remove(self, signal: RecordRoomSignal) -> None:
        """Remove a signal that was closed. Idempotent."""
        for key in signal.keys:
            here = self._by_key.get(key, set())
            here.discard(signal)
            if not here:
                self._by_key.pop(key, None)

    def notify(self, keys: Iterable[str]) -> None:
        """Notify the signals of some keys."""
        for key in keys:
            for signal in self._by_key.get(key, ()):
                signal.notify()


class RecordRoomSignal:
    """A room signal of a `RecordBackend`, which ``signals`` notifies while it is open."""

    def __init__(self, signals: RecordRoomNotifier, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self._signals = signals
        self._rang = asyncio.Event()

    def notify(self) -> None:
        """Wake the current call of `wait`, or let the next one return at once."""
        self._rang.set()

    async def wait(self, timeout: float) -> None:
        """Wait for a notification. The timeout is measured by the event loop's clock, not by the store's."""
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
