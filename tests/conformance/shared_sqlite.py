"""A backend whose processes share one SQLite file. The kit passes on it, and finds each mistake that it is given.

`taskqueue_core.recordstore` is made for one process. What several processes need is added here: locked transactions,
positions and hints that are read again after another process has written, signs of life, and notifications.
"""

# ruff: noqa: D102 - the docstrings are those of the classes that are changed
from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import msgspec

from taskqueue_core.authoring.helpers import workers_of
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import Maintained
from taskqueue_core.clock import Clock, SystemClock
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.recordstore import RecordBackend
from taskqueue_core.recordstore.audit import RecordAudit
from taskqueue_core.recordstore.backend import RecordPublisher
from taskqueue_core.recordstore.control import RecordControl
from taskqueue_core.recordstore.dependencies import RecordDependencies
from taskqueue_core.recordstore.listing import RecordListing
from taskqueue_core.recordstore.notify import RecordRoomSignal
from taskqueue_core.recordstore.schedules import RecordSchedules
from taskqueue_core.recordstore.streams import RecordStreams
from taskqueue_core.recordstore.subscription import RecordSubscription
from taskqueue_core.recordstore.transitions import Transitions
from taskqueue_core.tasks import QueueStats, Received, WorkerInfo
from tests.conformance.shared_store import Life, SharedStore

CAPABILITIES = Capabilities(
    names=frozenset(
        {
            Capability.DEAD_LETTERS,
            Capability.CONTROL,
            Capability.FLOW,
            Capability.UNIQUE,
            Capability.AUDIT,
            Capability.SCHEDULES,
            Capability.AFTER,
            Capability.LISTING,
            Capability.STREAMS,
        }
    ),
    shared=True,
    durable=True,
)
_LOOK = 0.004
"""seconds of real time between two looks for commits of other processes, of which SQLite does not notify"""
_EARLY = {"1 ms early": 0.001, "0.2 s early": 0.2}

_LOCAL = WeakSet["SharedTransitions"]()
"""the backends of this process that a step notifies, in place of all processes: a mistake"""


class SharedTransitions(Transitions):
    """Transitions on a file that other processes change as well."""

    store: SharedStore

    def __init__(self, store: SharedStore, clock: Clock, lease: float) -> None:
        super().__init__(store, clock)
        self.lease = lease
        self._version = -1
        self._watcher: asyncio.Task[None] | None = None
        first = 1 if "own owner numbers" in store.mistakes else secrets.randbits(48)
        self.owners = itertools.count(first)

    @contextmanager
    def step(self, unsure: type[TaskQueueError] = BackendUnavailable) -> Iterator[float]:
        with super().step(unsure) as now:
            if (version := self.store.version()) != self._version:
                self._version = version
                self._read_again()
            yield now
        for other in _LOCAL:
            other.subscriptions.notify(self._news)
            other.signals.notify(self._room)

    def _open(self) -> None:
        self.store.open()
        self.opened = True
        if "takes back at opening" in self.store.mistakes:
            with self.store.transaction(BackendUnavailable):
                for record in self.store.owned():
                    self.take_back(record, self.clock.now(), lost=True)

    def _read_again(self) -> None:
        """Forget what another process has changed: the settings, the last position and the hints."""
        self.store.forget()
        if "own positions" not in self.store.mistakes:
            self._place = self.store.last_position()
        if "own hints" not in self.store.mistakes:
            self.hints.forget(self.store.queues() | self.subscriptions.keys)

    def promote(self, keys: Collection[str], now: float) -> float:
        early = sum(_EARLY.get(mistake, 0) for mistake in self.store.mistakes)
        return super().promote(keys, now + early)

    def watch(self) -> None:
        """Notify receives and room signals of this process when another process has committed."""
        if "no wake-up between processes" in self.store.mistakes:
            _LOCAL.add(self)
        elif self._watcher is None:
            with self.step():
                seen = self.store.version()
            self._watcher = asyncio.ensure_future(self._watch(seen))

    async def _watch(self, seen: int) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            with suppress(BackendUnavailable):
                if (version := self.store.version()) != seen:
                    seen = version
                    self.subscriptions.notify(self.subscriptions.keys)
                    if "own room signals" not in self.store.mistakes:
                        self.signals.notify(self.signals.keys)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        super().close()

    def others(self) -> list[Life]:
        """Return the signs of life of the subscriptions of other processes."""
        own = {number_of(subscription) for subscription in self.subscriptions.all}
        return [life for life in self.store.lives() if life.owner not in own]

    def recover(self) -> int:
        """Release the deliveries of silent subscriptions as lost, and return their number."""
        if "the dead stay" in self.store.mistakes:
            return 0
        recovered = 0
        with self.step() as now:
            for life in self.store.lives():
                if life.silent_at <= now:
                    for record in self.store.owned(life.owner):
                        self.take_back(record, now, lost=True)
                        recovered += 1
                    self.store.end_life(life.owner)
        return recovered


def number_of(subscription: Any) -> int:
    """Return the owner number of a subscription."""
    number: int = subscription._number
    return number


class SharedPublisher(RecordPublisher):
    """A publisher whose room signals also hear of other processes."""

    _transitions: SharedTransitions

    def room_signal(self, *keys: str) -> RecordRoomSignal:
        self._transitions.watch()
        return super().room_signal(*keys)


class SharedSubscription(RecordSubscription):
    """A subscription that gives signs of life from its first receive until it is closed."""

    _transitions: SharedTransitions
    _signs: Any = None

    async def receive(self, limit: int, timeout: float | None) -> Received:
        if self._signs is None and not self.closed:
            self._give_sign()
            self._transitions.watch()
        if "polls" in self._transitions.store.mistakes and timeout is None:
            while not (received := await super().receive(limit, 0)).deliveries:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return received
        return await super().receive(limit, timeout)

    def take(self, limit: int) -> Received:
        transitions, store = self._transitions, self._transitions.store
        if "candidates before the lock" in store.mistakes and transitions.opened:
            now = transitions.clock.now()
            store.look_ahead([key for key in self.keys if transitions.hints.due(key) > now])
        return super().take(limit)

    def _give_sign(self) -> None:
        transitions, lease = self._transitions, self._transitions.lease
        with suppress(BackendUnavailable), transitions.step() as now:
            transitions.store.give_sign(
                Life(self._number, self.consumer, self.keys, self.since, now + lease)
            )
        if "no sign of life" in transitions.store.mistakes:
            self._signs = ()
        elif not self.closed:
            self._signs = transitions.clock.call_at(
                transitions.clock.now() + lease / 3, self._give_sign
            )

    async def close(self) -> None:
        await super().close()
        if self._signs:
            self._signs.cancel()
        with suppress(BackendUnavailable), self._transitions.step():
            self._transitions.store.end_life(self._number)


class SharedControl(RecordControl):
    """Control over the queues and workers of all processes."""

    _transitions: SharedTransitions

    async def maintain(self) -> Maintained:
        recovered = self._transitions.recover()
        done = await super().maintain()
        return msgspec.structs.replace(done, recovered=done.recovered + recovered)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        transitions, store = self._transitions, self._transitions.store
        if "own workers" in store.mistakes:
            return await super().workers()
        with transitions.step():
            others = [
                SimpleNamespace(**life._asdict(), in_flight=len(store.owned(life.owner)))
                for life in transitions.others()
            ]
            return workers_of([*transitions.subscriptions.all, *others])

    async def stats(self, key: str) -> QueueStats:
        stats = await super().stats(key)
        with self._transitions.step():
            others = sum(key in life.keys for life in self._transitions.others())
        return msgspec.structs.replace(stats, subscribers=stats.subscribers + others)

    def _unclaimed(self) -> tuple[str, ...]:
        with self._transitions.step():
            claimed = self._transitions.subscriptions.keys
            claimed = claimed.union(*(life.keys for life in self._transitions.others()))
            return tuple(sorted(self._transitions.store.waiting_keys() - claimed))


class SharedSchedules(RecordSchedules):
    """Schedules whose signals are also set after commits of other processes."""

    _transitions: SharedTransitions

    def signal(self) -> RecordRoomSignal:
        self._transitions.watch()
        return super().signal()


class SharedStreams(RecordStreams):
    """Streams whose readers are also notified of commits of other processes."""

    _transitions: SharedTransitions

    def _signal(self, name: str) -> RecordRoomSignal:
        self._transitions.watch()
        return super()._signal(name)


class SharedDependencies(RecordDependencies):
    """Lines whose wait also ends after commits of other processes."""

    _transitions: SharedTransitions

    async def changed(self, seconds: float) -> None:
        self._transitions.watch()
        await super().changed(seconds)


class SharedBackend(RecordBackend):
    """A backend on a file that other processes have open as well."""

    def __init__(
        self, path: Path, clock: Clock, *, lease: float = 30.0, mistakes: Collection[str] = ()
    ) -> None:
        self.path = path
        self.clock = clock
        self.store = SharedStore(path, mistakes)
        super().__init__("shared", self.store, clock, durable=True)
        self.capabilities = CAPABILITIES
        self._transitions = SharedTransitions(self.store, clock, lease)
        self.publisher = SharedPublisher(self._transitions)
        self.dead_letters._transitions = self._transitions
        self.control = SharedControl(self._transitions, self.control._stored)
        self.audit = RecordAudit(self._transitions)
        self.listing = RecordListing(self._transitions)
        self.streams = SharedStreams(self._transitions)
        self.schedules = SharedSchedules(self._transitions, self.publisher.publish_one)
        self.dependencies = SharedDependencies(self._transitions)

    def subscribe(self, keys: Iterable[str], consumer: str) -> SharedSubscription:
        self._transitions.ensure_open()
        return SharedSubscription(self._transitions, keys, consumer)


def open_shared(path: Path, mistakes: Collection[str] = ()) -> SharedBackend:
    """Open the file in another process, with a short lease."""
    return SharedBackend(path, SystemClock(), lease=1.5, mistakes=mistakes)
