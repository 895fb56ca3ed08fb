"""Waking waiting receives: one doorbell for all subscriptions of a process, one timer per partition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, Self

from taskqueue_core.clock import Clock, SystemClock, Timer
from taskqueue_core.errors import TaskQueueError
from taskqueue_redis.connection.background import Owned
from taskqueue_redis.connection.client import Link
from taskqueue_redis.connection.errors import translated
from taskqueue_redis.connection.failures import Failure
from taskqueue_redis.connection.pubsub import Doorbell
from taskqueue_redis.scripts.keys import process_channel, signal_channel
from taskqueue_redis.scripts.receipts import Receipts
from taskqueue_redis.scripts.runner import Scripts, microseconds, seconds

_PROMOTED_AT_ONCE = 1000
_RETRY_SECONDS = 1.0  # seconds until a promotion that failed is tried again


class Sleeper(Protocol):
    """A subscription that may wait."""

    keys: tuple[str, ...]
    asleep: bool
    """whether it is to be woken: it waits, or will unless it finds something now"""

    def mark_uncertain(self) -> None:
        """Take into account that the store may have gone back: look at what it says is in flight here."""
        ...

    def wake(self, key: str | None) -> None:
        """Look again; ``key`` is known to have work."""
        ...


class ChannelListener(Protocol):
    """A bell that rings for what is published on some channels."""

    channels: tuple[str, ...]

    def notify(self) -> None:
        """Say that there may be what it waits for."""
        ...


class Wakeups:
    """Who waits for what."""

    def __init__(
        self,
        link: Link,
        scripts: Scripts,
        receipts: Receipts,
        clock: Clock | None,
        process: str,
        *,
        reopened: Callable[[], None],
    ) -> None:
        """Do no input or output. A ``clock`` counts in place of the store's time."""
        self._store_time = clock is None
        self._scripts = scripts
        self._receipts = receipts
        self._clock = clock or SystemClock()
        self._process = process
        self._doorbell = Doorbell(link, self._on_message, reopened)
        self._attendants: dict[str, dict[Sleeper, None]] = {}
        """subscriptions by key, the one that was not woken for the longest time first"""
        self._signals: dict[str, dict[ChannelListener, None]] = {}
        """those that are open, by channel"""
        self._timers: dict[str, tuple[int, Timer]] = {}
        self._openings: dict[str, tuple[float, Timer]] = {}
        """when queues that a limit holds up may be asked again"""
        self._tasks = Owned()
        self.offset = 0.0
        """seconds by which the store's clock is ahead of this process's"""

    @property
    def hears(self) -> bool:
        """Whether bells are heard, or none is listened for."""
        return self._doorbell.works or not self._attendants

    def now(self) -> float:
        """Return the store's time, as well as it is known here."""
        return self._clock.now() + self.offset

    def call_at(self, time: float, callback: Callable[[], None]) -> Timer:
        """Call back at a time of the store."""
        return self._clock.call_at(time - self.offset, callback)

    def learn_time(self, time: bytes) -> None:
        """Take the store's word on the time."""
        if self._store_time:
            self.offset = seconds(time) - self._clock.now()

    async def subscribe(self, sleeper: Sleeper) -> None:
        """Hear the bells of a subscription's queues for it; returns once none can be missed."""
        keys = sleeper.keys
        for key in keys:
            self._attendants.setdefault(key, {})[sleeper] = None
        partitions = self._scripts.partitions
        names = {partitions.of(key) for key in keys}
        channels = [signal_channel(partitions.of(key), key) for key in keys]
        channels += [signal_channel(name, "") for name in names]
        channels += [process_channel(name, self._process) for name in names]
        await self._doorbell.listen(*channels)

    def leave(self, sleeper: Sleeper) -> None:
        """Hear no more bells for it, but those that others here listen for."""
        silent = []
        for key in sleeper.keys:
            attendants = self._attendants.get(key, {})
            attendants.pop(sleeper, None)
            if not attendants:
                self._attendants.pop(key, None)
                silent.append(key)
        self._doorbell.ignore(
            *(signal_channel(self._scripts.partitions.of(key), key) for key in silent)
        )

    async def add_signal(self, signal: ChannelListener) -> None:
        """Ring a bell for its channels; returns once no ring can be missed."""
        for channel in signal.channels:
            self._signals.setdefault(channel, {})[signal] = None
        await self._doorbell.listen(*signal.channels)

    def remove_signal(self, signal: ChannelListener) -> None:
        """Ring a bell no more."""
        silent = []
        for channel in signal.channels:
            bells = self._signals.get(channel, {})
            bells.pop(signal, None)
            if not bells:
                self._signals.pop(channel, None)
                silent.append(channel)
        self._doorbell.ignore(*silent)

    def notify(self, key: str) -> None:
        """Wake the subscription whose turn it is for a queue. It rings on if it leaves work."""
        attendants = self._attendants.get(key, {})
        for sleeper in attendants:
            if sleeper.asleep:
                del attendants[sleeper]
                attendants[sleeper] = None
                sleeper.wake(key)
                return

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

    def note_opening(self, key: str, time: float) -> None:
        """Ring for a queue at a time of the store: a limit holds it up until then."""
        known = self._openings.get(key)
        if known is not None:
            if known[0] <= time:
                return
            known[1].cancel()
            del self._openings[key]
        if time <= self.now():
            self.notify(key)
        else:
            self._openings[key] = (time, self.call_at(time, lambda: self._open(key)))

    def _open(self, key: str) -> None:
        at, _ = self._openings.pop(key)
        self.note_opening(key, at)  # event loops may ring a hair too early

    async def aclose(self) -> None:
        """Wake everybody, and close the doorbell."""
        for _, timer in (*self._timers.values(), *self._openings.values()):
            timer.cancel()
        self._timers.clear()
        self._openings.clear()
        await self._tasks.aclose()
        await self._doorbell.aclose()

    def _fall_due(self, partition: str) -> None:
        self._timers.pop(partition, None)
        if self._anybody_asleep():  # nobody else needs it: a receive promotes what is due itself
            self._tasks.start(self._promote(partition))

    def _anybody_asleep(self) -> bool:
        return any(sleeper.asleep for listener in self._attendants.values() for sleeper in listener)

    async def _promote(self, partition: str) -> None:
        try:
            _, due = await self._scripts.run("promote", partition, _PROMOTED_AT_ONCE)
        except (Failure, TaskQueueError):
            due = str(microseconds(self.now() + _RETRY_SECONDS)).encode()
        self.note_due(partition, due)

    def _on_message(self, channel: str, message: bytes) -> None:
        partition, _, rest = channel.partition("}:")
        kind, _, key = rest.partition(":")
        if kind == "bell" and key:
            self.notify(key)
        elif kind == "bell":
            self.note_due(f"{partition}}}", message)
        elif kind == "process":
            token, fence, key = message.decode().split(" ", 2)
            self._receipts.revoke(token, fence, key)
        else:
            for rung in self._signals.get(channel, ()):
                rung.notify()

    def mark_uncertain(self) -> None:
        """The store has another history than before: what it confirmed last may be undone."""
        for sleeper in {
            sleeper: None for listener in self._attendants.values() for sleeper in listener
        }:
            sleeper.mark_uncertain()

    def wake_all(self) -> None:
        """Bells may have been missed: everybody looks once."""
        for sleeper in {
            sleeper: None for listener in self._attendants.values() for sleeper in listener
        }:
            if sleeper.asleep:
                sleeper.wake(None)
        for bells in self._signals.values():
            for rung in bells:
                rung.notify()
        for partition in {self._scripts.partitions.of(key) for key in self._attendants}:
            self._fall_due(partition)


class RedisRoomSignal:
    """See `taskqueue_core.capabilities.RoomBell`."""

    def __init__(self, wakeups: Wakeups, channels: tuple[str, ...]) -> None:
        """Do no input or output."""
        self.channels = channels
        self._wakeups = wakeups
        self._rang = asyncio.Event()

    def notify(self) -> None:
        """Say that there may be room."""
        self._rang.set()

    async def wait(self, timeout: float) -> None:
        """See `taskqueue_core.capabilities.RoomBell.rung`."""
        try:
            async with asyncio.timeout(timeout):
                await self._rang.wait()
        except TimeoutError:
            return
        self._rang.clear()

    async def __aenter__(self) -> Self:
        """Return it once no ring can be missed."""
        try:
            with translated():
                await self._wakeups.add_signal(self)
        except BaseException:
            self._wakeups.remove_signal(self)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ring no more."""
        self._wakeups.remove_signal(self)
