"""The open subscriptions, and what this process knows of the keys without asking the store."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

from taskqueue_core.authoring.helpers import LocalSubscription

__all__ = [
    "Hints",
    "OpenSubscriptions",
    "RecordRoomNotifier",
    "RecordRoomSignal",
]


class OpenSubscriptions:
    """The open subscriptions, by key."""

    def __init__(self) -> None:
        """Start without any."""
        self._by_key: dict[str, set[LocalSubscription]] = {}

    @property
    def keys(self) -> set[str]:
        """The keys with a subscription."""
        return set(self._by_key)

    @property
    def all(self) -> set[LocalSubscription]:
        """All of them."""
        return set[LocalSubscription]().union(*self._by_key.values())

    def of(self, key: str) -> set[LocalSubscription]:
        """Return those of a key."""
        return self._by_key.get(key, set())

    def add(self, subscription: LocalSubscription) -> None:
        """Note an open one."""
        for key in subscription.keys:
            self._by_key.setdefault(key, set()).add(subscription)

    def remove(self, subscription: LocalSubscription) -> None:
        """Forget a closed one; once more is harmless."""
        for key in subscription.keys:
            here = self.of(key)
            here.discard(subscription)
            if not here:
                self._by_key.pop(key, None)


class Hints:
    """Which keys may have something waiting, and when the first task of each falls due, or earlier.

    Idle keys cost no look-up that way; an error costs one look-up without a result.
    """

    def __init__(self) -> None:
        """Start with no keys."""
        self.waiting: set[str] = set()
        """every key with something waiting, and perhaps others"""
        self._due: dict[str, float] = {}

    def note_due(self, key: str, at: float) -> None:
        """Note that something of the key falls due at a time."""
        self._due[key] = min(at, self.due(key))

    def due(self, key: str) -> float:
        """When the key's first task falls due, or earlier; infinite: never."""
        return self._due.get(key, math.inf)

    def nothing_due(self, key: str) -> None:
        """Note that nothing of the key is scheduled."""
        self._due.pop(key, None)

    def forget(self, keys: Iterable[str]) -> None:
        """Take nothing for granted about keys: a step was undone, or the store was opened."""
        for key in keys:
            self.waiting.add(key)
            self._due[key] = -math.inf


class RecordRoomNotifier:
    """The open signals, by key."""

    def __init__(self) -> None:
        """Start without any."""
        self._by_key: dict[str, set[RecordRoomSignal]] = {}

    def add(self, signal: RecordRoomSignal) -> None:
        """Note an open one."""
        for key in signal.keys:
            self._by_key.setdefault(key, set()).add(signal)

    def remove(self, signal: RecordRoomSignal) -> None:
        """Forget a closed one; once more is harmless."""
        for key in signal.keys:
            here = self._by_key.get(key, set())
            here.discard(signal)
            if not here:
                self._by_key.pop(key, None)

    def notify(self, keys: Iterable[str]) -> None:
        """Notify those of some keys."""
        for key in keys:
            for signal in self._by_key.get(key, ()):
                signal.notify()


class RecordRoomSignal:
    """See `taskqueue_core.capabilities.RoomSignal`."""

    def __init__(self, signals: RecordRoomNotifier, keys: tuple[str, ...]) -> None:
        """Be notified by ``signals`` once it is open."""
        self.keys = keys
        self._signals = signals
        self._rang = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiter, or the next one."""
        self._rang.set()

    async def wait(self, timeout: float) -> None:
        """See `taskqueue_core.capabilities.RoomSignal.wait`. The seconds are real ones, not those of the store."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._rang.wait()
        self._rang.clear()

    async def __aenter__(self) -> Self:
        """Open it."""
        self._rang.clear()
        self._signals.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        self._signals.remove(self)
