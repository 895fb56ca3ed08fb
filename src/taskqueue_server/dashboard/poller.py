"""Polling of the store for the dashboard: about once a second while pages are open, for all of them together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from msgspec import structs

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.concurrency import first_completed
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.tasks import Health, QueueStats
from taskqueue_server.context.server import ServerContext, read_each
from taskqueue_server.context.statistics import AT_ONCE
from taskqueue_server.context.waiters import LimitedSlots
from taskqueue_server.dashboard.formatting import of_queue
from taskqueue_server.dashboard.local_metrics import Percentiles, ProcessGauges
from taskqueue_server.dashboard.snapshot import LISTED, History, Snapshot, StoreReading
from taskqueue_server.problems import ProblemError

MAX_STREAMS = 50
"""maximum number of pages with live updates"""
_SECOND = 1.0
_PAUSE_FACTOR = 4
"""the pause after a sample is at least this many times the sample's duration, unless a new page needs a sample"""
_SHORTEST = 0.05
_LINGER_SECONDS = 15.0
"""seconds for which polling continues after the last page was closed, so that the next page has a history"""
_PATIENCE = 5.0
_TEXTS = 20
"""number of queues whose texts are formatted before other tasks of the event loop get a turn"""
_HISTORY_SECONDS = 10.0
"""seconds for which the last run time of a queue is shown if no newer run time is measured"""
_STALE = 60.0
"""age in seconds up to which a new page shows the last read of many queues, with its own queues read again"""
_SHOWN_SECONDS = 10.0
"""seconds for which samples have the settings of a queue after a page has shown it, if there are many queues"""
_UNREAD = QueueSettings()
"""what a sample has in place of settings that are not read"""
T = TypeVar("T")
_log = logging.getLogger("taskqueue.server.dashboard")
_samplers: WeakKeyDictionary[ServerContext, StatsPoller] = WeakKeyDictionary()


class StatsPoller:
    """Poller of the store's statistics: takes samples while pages are open, and notifies the pages of each sample."""

    def __init__(self, context: ServerContext) -> None:
        # Do not keep the context itself: the weak dictionary removes this poller only if nothing refers to the context.
        self._backend, self._control = context.backend, context.control
        self._hooks, self._draining = context.hooks, context.draining
        self._statistics = context.statistics
        self.process_gauges = ProcessGauges(context.backend.now)
        self.history = History()
        self.latest: Snapshot | None = None
        self.room = LimitedSlots(MAX_STREAMS, "too_many_pages", "dashboard pages are open", 5)
        self._started = 0
        self._requested_at = 0.0
        self._drawn_at = 0.0
        self._good_from = 0
        """number of the first sample that `fresh` may return if there are many queues"""
        self._shown: dict[str, float] = {}
        """the queues that pages have shown, with the time until which their settings are read"""
        self._paused = 0.0
        """seconds of the last sample in which the server did other work"""
        self._after_gap = True
        self._poll_now = asyncio.Event()
        self._notified = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._made: WeakKeyDictionary[Snapshot, dict[Hashable, Any]] = WeakKeyDictionary()
        self._run_times: dict[str, tuple[float, Percentiles]] = {}
        self.turn = asyncio.Lock()
        """lock that lets only one page render at a time, so that many pages do not block the event loop"""

    @classmethod
    def of(cls, context: ServerContext) -> StatsPoller:
        """Return the server's poller, which is created for the first page."""
        poller = _samplers.get(context)
        if poller is None:
            poller = _samplers[context] = cls(context)
        return poller

    @contextmanager
    def stream(self, client: str | None = None) -> Iterator[None]:
        """Count an open page during the block. Raises `ProblemError` if too many pages are open, or on shutdown."""
        if self._draining.is_set():
            raise _ending()
        try:
            with self.room.acquire(client):
                yield
        finally:
            self._requested_at = time.monotonic()

    def made(self, snapshot: Snapshot) -> dict[Hashable, Any]:
        """Return the cache of the values derived from a sample. Each new sample starts with an empty cache."""
        made = self._made.get(snapshot)
        if made is None:
            made = self._made[snapshot] = {}
        return made

    def once(self, snapshot: Snapshot, name: Hashable, make: Callable[[], T]) -> T:
        """Return a value derived from a sample, which ``make`` computes once for all pages."""
        made = self.made(snapshot)
        if name not in made:
            made[name] = make()
        result: T = made[name]
        return result

    def texts(self, snapshot: Snapshot, key: str) -> dict[str, str]:
        """Return a queue's texts by the name of the page element that shows them."""
        return self.once(
            snapshot, key, lambda: of_queue(key, snapshot.readings[key], snapshot, self.history)
        )

    @property
    def newest(self) -> int:
        """The number that a new page passes to `after`.

        The page then gets the latest sample if the store is being polled, otherwise a new one.
        """
        return self._started if self._task is None else self._good_from - 1

    async def after(self, number: int) -> Snapshot | None:
        """Return the latest sample as soon as its number exceeds ``number``; return ``None`` on shutdown."""
        self._start()
        while self.latest is None or self.latest.number <= number:
            self._start()
            if self._task is None:
                return None
            await self._notified.wait()
        return self.latest

    async def fresh(self, *keys: str) -> Snapshot:
        """Return a sample that is read from the store after this call. Raises `ProblemError` on shutdown.

        With more than `LISTED` queues, only the queues ``keys`` are read after this call. The others are those of the
        latest sample, or of the last read of all queues, which is up to a minute old while no page is open.
        """
        self._start()
        latest = self.latest
        if latest is None or not self._is_enough(latest, keys):
            latest = await self._early()
        if latest is not None:
            return await self._again(latest, [key for key in keys if key in latest.readings])
        started = self._started
        self._poll_now.set()
        snapshot = await self.after(started)
        if snapshot is None:
            raise _ending()
        return snapshot

    async def showing(self, snapshot: Snapshot, keys: Sequence[str]) -> Snapshot:
        """Return a sample in which the settings of the queues ``keys``, which a page shows, are read.

        With up to `LISTED` queues, it is the sample itself.
        """
        if not _is_many(snapshot):
            return snapshot
        until = time.monotonic() + _SHOWN_SECONDS
        shown = [key for key in keys if key in snapshot.readings]
        self._shown.update(dict.fromkeys(shown, until))
        unread = [key for key in shown if snapshot.readings[key].settings is _UNREAD]
        return await self._again(snapshot, unread)

    def outdate(self) -> None:
        """Let the next `fresh` not return the latest sample, for example because a queue was changed."""
        self._good_from = self._started + 1

    def _is_enough(self, latest: Snapshot, keys: Sequence[str]) -> bool:
        """Return whether a page of the queues ``keys`` may show the latest sample instead of another one."""
        good = latest.number >= self._good_from and latest.error is None
        return good and _is_many(latest) and latest.readings.keys() >= set(keys)

    async def _early(self) -> Snapshot | None:
        """Return a sample of many queues from the last read of all; ``None`` if it is too old, or the store fails."""
        read = self._statistics.recent(_STALE)
        if read is None or len(read.queues) <= LISTED:
            return None
        try:
            async with asyncio.timeout(_PATIENCE):
                health, keys = await self._backend.health(), await self._control.queues()
                new = [key for key in keys if key not in read.queues]
                stats = await read_each(self._control.stats, new, AT_ONCE)
                workers = await self._control.workers()
        except (TaskQueueError, TimeoutError):
            return None
        if len(keys) <= LISTED:
            return None
        known = {**read.queues, **dict(zip(new, stats, strict=True))}
        self._started += 1
        return Snapshot(
            number=self._started,
            at=self._backend.now(),
            readings=self._readings({key: known[key] for key in keys}, {}, {}),
            workers=workers,
            health=health,
        )

    async def _again(self, snapshot: Snapshot, keys: Sequence[str]) -> Snapshot:
        """Return a sample in which these queues are read again; with an error if the store does not answer."""
        if not keys:
            return snapshot
        try:
            async with asyncio.timeout(_PATIENCE):
                stats, settings = await asyncio.gather(
                    read_each(self._control.stats, keys, AT_ONCE),
                    read_each(self._control.settings, keys, AT_ONCE),
                )
        except TaskQueueError as failure:
            return structs.replace(snapshot, error=failure.code)
        except TimeoutError:
            return structs.replace(snapshot, error="timeout")
        readings = dict(snapshot.readings)
        for key, queue, rules in zip(keys, stats, settings, strict=True):
            readings[key] = structs.replace(readings[key], stats=queue, settings=rules)
        return structs.replace(snapshot, readings=readings)

    def _start(self) -> None:
        self._requested_at = time.monotonic()
        if self._task is None and not self._draining.is_set():
            self.outdate()  # the latest sample may be old
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self.process_gauges = ProcessGauges(self._backend.now)
        self._after_gap = True
        self._hooks.register(self.process_gauges)
        try:
            await first_completed(self._draining.wait(), self._poll())
        finally:
            self._hooks.unregister(self.process_gauges)
            self._task = None
            self._wake()

    async def _poll(self) -> None:
        while len(self.room) or time.monotonic() - self._requested_at < _LINGER_SECONDS:
            self._poll_now.clear()
            self._started += 1
            self._paused = 0.0
            began = time.monotonic()
            await self._notify(await self._take(self._started))
            took, paused = time.monotonic() - began, self._paused
            pause = max(_SHORTEST, _SECOND - took, _PAUSE_FACTOR * (took - paused) - paused)
            await asyncio.sleep(_SHORTEST)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause - _SHORTEST):
                    await self._poll_now.wait()

    async def _notify(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if snapshot.error is not None:
            self._after_gap = True
        elif now - self._drawn_at >= _SECOND - _SHORTEST:
            self.history.add(snapshot, after_gap=self._after_gap)
            self._drawn_at, self._after_gap = now, False
        shown = list(self._shown if _is_many(snapshot) else snapshot.readings)
        for number, key in enumerate(shown):
            if key not in snapshot.readings:
                continue
            self.texts(snapshot, key)
            if number % _TEXTS == _TEXTS - 1:
                await asyncio.sleep(0)
        self.latest = snapshot
        self._wake()

    def _wake(self) -> None:
        event, self._notified = self._notified, asyncio.Event()
        event.set()

    async def _take(self, number: int) -> Snapshot:
        error = "timeout"
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._ask(number)
        except TaskQueueError as failure:
            error = failure.code
        except TimeoutError:
            pass
        except Exception:  # noqa: BLE001 - the next sample may succeed
            _log.exception("could not read the store for the dashboard")
            error = "internal"
        before = self.latest
        return Snapshot(
            number=number,
            at=self._backend.now(),
            readings=before.readings if before else {},
            workers=before.workers if before else (),
            health=Health(ok=False, backend=before.health.backend if before else "unknown"),
            error=error,
        )

    async def _ask(self, number: int) -> Snapshot:
        health = await self._backend.health()
        measured = self.process_gauges.take()
        read = await self._statistics.read(at_once=self._statistics.latest is None)
        self._paused = read.paused
        many, now = len(read.queues) > LISTED, time.monotonic()
        self._shown = {key: until for key, until in self._shown.items() if until >= now}
        keys = [key for key in read.queues if not many or key in self._shown]
        settings = await read_each(self._control.settings, keys, AT_ONCE)
        workers = await self._control.workers()
        rules = dict(zip(keys, settings, strict=True))
        readings = self._readings(read.queues, rules, measured)
        at = self._backend.now()
        return Snapshot(number=number, at=at, readings=readings, workers=workers, health=health)

    def _readings(
        self,
        queues: Mapping[str, QueueStats],
        rules: Mapping[str, QueueSettings],
        measured: Mapping[str, Percentiles],
    ) -> dict[str, StoreReading]:
        run_times = self._recent(measured, self._backend.now())
        return {
            key: StoreReading(queue, rules.get(key, _UNREAD), run_times.get(key), key in measured)
            for key, queue in queues.items()
        }

    def _recent(self, measured: Mapping[str, Percentiles], now: float) -> dict[str, Percentiles]:
        for key, result in measured.items():
            self._run_times[key] = (now, result)
        for key, (at, _) in list(self._run_times.items()):
            if now - at > _HISTORY_SECONDS:
                del self._run_times[key]
        return {key: result for key, (_, result) in self._run_times.items()}


def _is_many(snapshot: Snapshot) -> bool:
    """Return whether a sample has more queues than a page, which does not wait for a sample of all then."""
    return len(snapshot.readings) > LISTED


def _ending() -> ProblemError:
    return ProblemError(
        503, "draining", "this server is shutting down", headers={"retry-after": "1"}
    )
