"""Waking waiting receives: one doorbell for all subscriptions of the process, one timer per partition. Nothing polls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from taskqueue_core.clock import Clock, Timer
from taskqueue_core.errors import TaskQueueError
from taskqueue_redis.doorbell import Doorbell
from taskqueue_redis.failures import Failure
from taskqueue_redis.keys import bell, process_channel
from taskqueue_redis.link import Link
from taskqueue_redis.owned import Owned
from taskqueue_redis.receipts import Receipts
from taskqueue_redis.scripts import Scripts, microseconds, seconds

__all__ = ["Sleeper", "Wakeups"]

_PROMOTED_AT_ONCE = 1000
_AGAIN = 1.0  # seconds until a promotion that failed is tried again


class Sleeper(Protocol):
    """A subscription that may wait."""

    keys: tuple[str, ...]

    def wake(self, key: str | None) -> None:
        """Look again; ``key`` is known to have work."""
        ...


class Wakeups:
    """Who waits for what."""

    def __init__(
        self, link: Link, scripts: Scripts, receipts: Receipts, clock: Clock, process: str
    ) -> None:
        """Do no input or output."""
        self._scripts = scripts
        self._receipts = receipts
        self._clock = clock
        self._process = process
        self._doorbell = Doorbell(link, self._heard, self._reopened)
        self._attention: Counter[str] = Counter()
        self._sleepers: dict[str, dict[Sleeper, None]] = {}
        self._timers: dict[str, tuple[int, Timer]] = {}
        self._tasks = Owned()
        self.offset = 0.0
        """seconds by which the store's clock is ahead of this process's"""

    def now(self) -> float:
        """Return the store's time, as well as it is known here."""
        return self._clock.now() + self.offset

    def call_at(self, time: float, callback: Callable[[], None]) -> Timer:
        """Call back at a time of the store."""
        return self._clock.call_at(time - self.offset, callback)

    def told(self, time: bytes) -> None:
        """Take the store's word on the time."""
        self.offset = seconds(time) - self._clock.now()

    async def attend(self, keys: tuple[str, ...]) -> None:
        """Hear the bells of these queues; returns once none can be missed."""
        self._attention.update(keys)
        partitions = self._scripts.partitions
        names = {partitions.of(key) for key in keys}
        channels = [bell(partitions.of(key), key) for key in keys]
        channels += [bell(name, "") for name in names]
        channels += [process_channel(name, self._process) for name in names]
        await self._doorbell.listen(*channels)

    def leave(self, keys: tuple[str, ...]) -> None:
        """Stop hearing the bells that nobody else here listens for."""
        self._attention.subtract(keys)
        silent = [key for key in keys if self._attention[key] <= 0]
        for key in silent:
            del self._attention[key]
        self._doorbell.ignore(*(bell(self._scripts.partitions.of(key), key) for key in silent))

    def sleep(self, sleeper: Sleeper) -> None:
        """Count a subscription among those that may be woken."""
        for key in sleeper.keys:
            self._sleepers.setdefault(key, {})[sleeper] = None

    def rise(self, sleeper: Sleeper) -> None:
        """Count it no longer."""
        for key in sleeper.keys:
            waiting = self._sleepers.get(key)
            if waiting is not None:
                waiting.pop(sleeper, None)
                if not waiting:
                    del self._sleepers[key]

    def ring(self, key: str) -> None:
        """Wake the subscription that waits longest for a queue. It rings on if it leaves work."""
        waiting = self._sleepers.get(key)
        if waiting:
            sleeper = next(iter(waiting))
            self.rise(sleeper)
            sleeper.wake(key)

    def note_due(self, partition: str, time: bytes) -> None:
        """Have what falls due at ``time`` promoted then; empty for nothing."""
        if not time:
            return
        due = int(time)
        known = self._timers.get(partition)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        if seconds(due) <= self.now():
            self._fall_due(partition)
            return
        timer = self.call_at(seconds(due), lambda: self._fall_due(partition))
        self._timers[partition] = (due, timer)

    async def aclose(self) -> None:
        """Wake everybody, and close the doorbell."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self._tasks.aclose()
        await self._doorbell.aclose()

    def _fall_due(self, partition: str) -> None:
        self._timers.pop(partition, None)
        self._tasks.start(self._promote(partition))

    async def _promote(self, partition: str) -> None:
        try:
            _, due = await self._scripts.run("promote", partition, _PROMOTED_AT_ONCE)
        except (Failure, TaskQueueError):
            due = str(microseconds(self.now() + _AGAIN)).encode()
        self.note_due(partition, due)

    def _heard(self, channel: str, message: bytes) -> None:
        partition, _, rest = channel.partition("}:")
        kind, _, key = rest.partition(":")
        if kind == "bell" and key:
            self.ring(key)
        elif kind == "bell":
            self.note_due(f"{partition}}}", message)
        else:
            token, fence, key = message.decode().split(" ", 2)
            self._receipts.revoke(token, fence, key)

    def _reopened(self) -> None:
        sleepers = {sleeper: None for waiting in self._sleepers.values() for sleeper in waiting}
        for sleeper in sleepers:
            self.rise(sleeper)
            sleeper.wake(None)
        for partition in self._scripts.partitions.names:
            if any(self._scripts.partitions.of(key) == partition for key in self._attention):
                self._fall_due(partition)
