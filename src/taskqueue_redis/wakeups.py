"""Waking of subscriptions and signals: one pub/sub connection per process, and timers for due tasks and rate limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal, Self, TypeVar

from taskqueue_core.capabilities import EventPage, Position
from taskqueue_core.clock import Timer
from taskqueue_core.errors import TaskQueueError
from taskqueue_redis.connection.background import BackgroundTasks
from taskqueue_redis.connection.errors import contract_error
from taskqueue_redis.connection.failures import Failure
from taskqueue_redis.connection.pubsub import PubSubListener
from taskqueue_redis.scripts.receipts import Consumer, Receipts
from taskqueue_redis.scripts.runner import ScriptRunner, microseconds, seconds
from taskqueue_redis.tails import Tails

T = TypeVar("T")

_PROMOTED_AT_ONCE = 1000
_RETRY_SECONDS = 1.0
"""seconds after which a failed promotion of due tasks is retried"""
_LINGER = 2.0
"""seconds for which a channel is listened to after its last signal was closed"""


def channel_of(
    partition: str,
    kind: Literal["bell", "room", "slots", "schedules", "lines", "events", "process"],
    name: str,
) -> str:
    """Return the name of a channel.

    ``bell``: new work in queue ``name``, or a new due time in the partition if ``name`` is empty. ``room``: the full
    queue ``name`` may accept tasks again. ``slots``: free slots of a model, and notes for its jobs. ``schedules``: a
    schedule of the partition may fire earlier than the one that was first before. ``lines``: lines for
    other partitions. ``events``: events of the task ``name``, its queue, "/" and its id. ``process``: deliveries that
    the consumers of a process have lost.
    """
    return f"{partition}:{kind}:{name}"


class Wakeups:
    """The open subscriptions and signals of this process, with the timers and notifications that wake them."""

    def __init__(self, scripts: ScriptRunner, receipts: Receipts, process_id: str) -> None:
        self.subscriptions: dict[Consumer, None] = {}
        """subscriptions that are not closed"""
        self.tails = Tails()
        """the newest events of the tasks to whose channels this process listens"""
        self._scripts = scripts
        self._receipts = receipts
        self._clock = scripts.clock
        self._process_id = process_id
        self._listener = PubSubListener(scripts.client, self._on_message, self.reconnected)
        self._listening: dict[str, dict[Consumer, None]] = {}
        """registered subscriptions by queue key, the least recently woken first"""
        self._signals: dict[str, dict[RedisRoomSignal, None]] = {}
        """open signals by channel"""
        self._left: dict[str, float] = {}
        """by channel without a signal, when its subscription ends, in this order: most signals are soon opened again"""
        self._leaving: asyncio.TimerHandle | None = None
        self._timers: dict[str, tuple[int, Timer]] = {}
        """by partition, the next due time in microseconds, and a timer for that time"""
        self._openings: dict[str, tuple[float, Timer]] = {}
        """by queue key, the time at which the queue's rate limit allows deliveries again, and a timer for that time"""
        self._tasks = BackgroundTasks()
        self._closed = False
        scripts.client.trouble.healed = self.reconnected

    @property
    def works(self) -> bool:
        """Whether notifications arrive, or are not needed because no subscription is registered."""
        return self._listener.works or not self._listening

    async def join_all(self) -> None:
        """Register all open subscriptions of this process with the store."""
        for subscription in tuple(self.subscriptions):
            await subscription.join()

    async def listen(self, subscription: Consumer) -> None:
        """Wake a subscription from now on when its queues have work. Return once no notification can be missed."""
        keys = subscription.keys
        for key in keys:
            self._listening.setdefault(key, {})[subscription] = None
        partitions = self._scripts.partitions
        names = {partitions.of(key) for key in keys}
        channels = [channel_of(partitions.of(key), "bell", key) for key in keys]
        channels += [channel_of(name, "bell", "") for name in names]
        channels += [channel_of(name, "process", self._process_id) for name in names]
        await self._subscribe(channels)

    def leave(self, subscription: Consumer) -> None:
        """Stop waking a subscription."""
        of = self._scripts.partitions.of
        unused = _remove(self._listening, subscription.keys, subscription)
        self._listener.ignore(*(channel_of(of(key), "bell", key) for key in unused))

    async def add_signal(self, signal: RedisRoomSignal) -> None:
        """Notify a signal of messages on its channels from now on. Return once no message can be missed."""
        for channel in signal.channels:
            self._signals.setdefault(channel, {})[signal] = None
            self._left.pop(channel, None)
        await self._subscribe(signal.channels)

    def remove_signal(self, signal: RedisRoomSignal) -> None:
        """Stop notifying a signal."""
        unused = _remove(self._signals, signal.channels, signal)
        if unused and not self._closed:
            end = asyncio.get_running_loop().time() + _LINGER
            self._left.update(dict.fromkeys(unused, end))
            if self._leaving is None:
                self._leave_channels()

    def tail_page(self, channel: str, after: Position, limit: int) -> EventPage | None:
        """Return what `Tails.page` does. If there are events, continue to listen to the channel."""
        page = self.tails.page(channel, after, limit)
        if page is not None and page.events and self._left.pop(channel, None) is not None:
            self._left[channel] = asyncio.get_running_loop().time() + _LINGER
        return page

    def _leave_channels(self) -> None:
        """End the subscriptions of channels for which no signal was opened again in time."""
        self._leaving = None
        loop = asyncio.get_running_loop()
        while self._left:
            channel, end = next(iter(self._left.items()))
            if end > loop.time():
                self._leaving = loop.call_at(end, self._leave_channels)
                return
            del self._left[channel]
            self._listener.ignore(channel)
            self.tails.forget(channel)

    async def _subscribe(self, channels: Iterable[str]) -> None:
        try:
            await self._listener.listen(*channels)
        except Failure as failure:
            raise contract_error(failure) from failure

    def notify(self, key: str) -> None:
        """Wake the next waiting subscription of a queue. It wakes another one if it does not take all the work."""
        listening = self._listening.get(key, {})
        for subscription in listening:
            if subscription.asleep:
                del listening[subscription]
                listening[subscription] = None
                subscription.wake(key)
                return

    def note_due(self, partition: str, time: bytes) -> None:
        """Promote due tasks of a partition at ``time``, in microseconds. If ``time`` is empty, no task is scheduled."""
        if not time:
            return
        due = int(time)
        known = self._timers.get(partition)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        if seconds(due) <= self._clock.now(partition):
            self._fall_due(partition)
            return
        timer = self._clock.call_at(seconds(due), lambda: self._fall_due(partition), partition)
        self._timers[partition] = (due, timer)

    def note_opening(self, key: str, time: float) -> None:
        """Wake a subscription of a queue at ``time`` (store's clock), when a rate limit allows deliveries again."""
        known = self._openings.get(key)
        if known is not None:
            if known[0] <= time:
                return
            known[1].cancel()
            del self._openings[key]
        partition = self._scripts.partitions.of(key)
        if time <= self._clock.now(partition):
            self.notify(key)
        else:
            timer = self._clock.call_at(time, lambda: self._open(key), partition)
            self._openings[key] = (time, timer)

    def _open(self, key: str) -> None:
        at, _ = self._openings.pop(key)
        self.note_opening(key, at)  # a timer may fire slightly too early

    async def aclose(self) -> None:
        """Cancel all timers, end the background work, and close the pub/sub connection."""
        self._closed = True
        for _, timer in (*self._timers.values(), *self._openings.values()):
            timer.cancel()
        if self._leaving is not None:
            self._leaving.cancel()
        self._timers.clear()
        self._openings.clear()
        await self._tasks.aclose()
        await self._listener.aclose()

    def _fall_due(self, partition: str) -> None:
        self._timers.pop(partition, None)
        # Without a waiting receive no promotion is needed, because the next receive promotes due tasks itself.
        if any(subscription.asleep for subscription in self._registered()):
            self._tasks.start(self._promote(partition))

    async def _promote(self, partition: str) -> None:
        try:
            _, due = await self._scripts.run("promote", partition, _PROMOTED_AT_ONCE)
        except TaskQueueError:
            due = str(microseconds(self._clock.now(partition) + _RETRY_SECONDS)).encode()
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
            if kind == "events":
                self.tails.hear(channel, message)
            for signal in self._signals.get(channel, ()):
                signal.notify()

    def reconnected(self) -> None:
        """Recover after an outage, which may have hidden notifications and undone confirmed writes."""
        self.tails.clear()
        if not self._closed:
            self._tasks.start(self._recover())
            if self._scripts.checks is not None:
                self._scripts.checks.files.start()

    async def _recover(self) -> None:
        checks = self._scripts.checks
        if checks is not None and await checks.failed_over():
            # The store may again list deliveries as in flight that this process had settled before the failover.
            self._receipts.mark_uncertain()
            for subscription in self._registered():
                subscription.mark_uncertain()
        self._wake_all()

    def _wake_all(self) -> None:
        for subscription in self._registered():
            if subscription.asleep:
                subscription.wake(None)
        for signals in self._signals.values():
            for signal in signals:
                signal.notify()
        for partition in {self._scripts.partitions.of(key) for key in self._listening}:
            self._fall_due(partition)

    def _registered(self) -> dict[Consumer, None]:
        """Return the registered subscriptions, each of them once."""
        return {each: None for listening in self._listening.values() for each in listening}


def _remove(table: dict[str, dict[T, None]], names: Iterable[str], listener: T) -> list[str]:
    """Remove a listener from a table, and return the names that have no listener left."""
    unused = []
    for name in names:
        listeners = table.get(name, {})
        listeners.pop(listener, None)
        if not listeners:
            table.pop(name, None)
            unused.append(name)
    return unused


class RedisRoomSignal:
    """A signal that queues may accept tasks again, or that slots may be free."""

    def __init__(self, wakeups: Wakeups, channels: tuple[str, ...]) -> None:
        self.channels = channels
        self._wakeups = wakeups
        self._event = asyncio.Event()

    def notify(self) -> None:
        """End the wait in progress. If there is none, the next wait returns at once."""
        self._event.set()

    async def wait(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()

    async def __aenter__(self) -> Self:
        """Return the signal once no notification can be missed."""
        try:
            await self._wakeups.add_signal(self)
        except BaseException:
            self._wakeups.remove_signal(self)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._wakeups.remove_signal(self)
