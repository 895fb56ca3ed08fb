"""Polling of the store for the dashboard: about once a second while pages are open, for all of them together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from msgspec import structs

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.concurrency import first_completed
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.tasks import Health
from taskqueue_server.context.server import ServerContext, read_each
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
_MAX_CONCURRENT = 100
_TEXTS = 20
"""number of queues whose texts are formatted before other tasks of the event loop get a turn"""
_HISTORY_SECONDS = 10.0
"""seconds for which the last run time of a queue is shown if no newer run time is measured"""
_RULES_SECONDS = 10.0
"""seconds after which the settings of many queues are read again; a change through this server is seen at once"""
T = TypeVar("T")
_log = logging.getLogger("taskqueue.server.dashboard")
_samplers: WeakKeyDictionary[ServerContext, StatsPoller] = WeakKeyDictionary()


class StatsPoller:
    """Poller of the store's statistics: takes samples while pages are open, and notifies the pages of each sample."""

    def __init__(self, context: ServerContext) -> None:
        # Do not keep the context itself: the weak dictionary removes this poller only if nothing refers to the context.
        self._backend, self._control = context.backend, context.control
        self._hooks, self._draining = context.hooks, context.draining
        self.process_gauges = ProcessGauges(context.backend.now)
        self.history = History()
        self.latest: Snapshot | None = None
        self.room = LimitedSlots(MAX_STREAMS, "too_many_pages", "dashboard pages are open", 5)
        self.since = 0.0
        """time by the store's clock at which `process_gauges` began to count"""
        self._started = 0
        self._requested_at = 0.0
        self._drawn_at = 0.0
        self._good_from = 0
        """number of the first sample that `fresh` may return if there are many queues"""
        self._rules: dict[str, QueueSettings] = {}
        self._rules_until = 0.0
        """time up to which the settings of many queues are not read again"""
        self._after_gap = True
        self._poll_now = asyncio.Event()
        self._notified = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._made: tuple[Snapshot | None, dict[Hashable, Any]] = (None, {})
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
        if self._made[0] is not snapshot:
            self._made = (snapshot, {})
        return self._made[1]

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
        return -1 if self._task is not None else self._started

    async def after(self, number: int) -> Snapshot | None:
        """Return the latest sample as soon as its number exceeds ``number``; return ``None`` on shutdown."""
        self._start()
        while self.latest is None or self.latest.number <= number:
            self._start()
            if self._task is None:
                return None
            await self._notified.wait()
        return self.latest

    async def fresh(self, key: str | None = None) -> Snapshot:
        """Return a sample that is read from the store after this call. Raises `ProblemError` on shutdown.

        With more than `LISTED` queues, it is the latest sample, while samples are taken, and only the queue ``key`` is
        read again.
        """
        self._start()
        latest = self.latest
        if latest is not None and latest.number >= self._good_from and self._is_enough(latest):
            again = latest if key is None else await self._again(latest, key)
            if again is not None:
                return again
        started = self._started
        self._poll_now.set()
        snapshot = await self.after(started)
        if snapshot is None:
            raise _ending()
        return snapshot

    def outdate(self) -> None:
        """Let the next `fresh` read all queues, for example because one of them was changed."""
        self._good_from, self._rules_until = self._started + 1, 0.0

    def _is_enough(self, latest: Snapshot) -> bool:
        """Return whether a page may show the latest sample, because another one takes long with many queues."""
        return latest.error is None and len(latest.readings) > LISTED

    async def _again(self, snapshot: Snapshot, key: str) -> Snapshot | None:
        """Return a sample in which one queue is read again; ``None`` if the queue is new, or the store fails."""
        before = snapshot.readings.get(key)
        if before is None:
            return None
        try:
            async with asyncio.timeout(_PATIENCE):
                stats = await self._control.stats(key)
                settings = await self._control.settings(key)
        except (TaskQueueError, TimeoutError):
            return None
        reading = structs.replace(before, stats=stats, settings=settings)
        return structs.replace(snapshot, readings={**snapshot.readings, key: reading})

    def _start(self) -> None:
        self._requested_at = time.monotonic()
        if self._task is None and not self._draining.is_set():
            self.outdate()  # the latest sample may be old
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self.process_gauges = ProcessGauges(self._backend.now)
        self.since = self._backend.now()
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
            began = time.monotonic()
            await self._notify(await self._take(self._started))
            took = time.monotonic() - began
            pause = max(_SECOND - took, _PAUSE_FACTOR * took)
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
        for number, key in enumerate(list(snapshot.readings)[:LISTED]):
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
        control, backend = self._control, self._backend
        health = await backend.health()
        keys = await control.queues()
        measured = self.process_gauges.take()
        run_times = self._recent(measured, backend.now())
        stats = await read_each(control.stats, keys, _MAX_CONCURRENT)
        settings = await self._settings(keys)
        readings = {
            queue.key: StoreReading(queue, rules, run_times.get(queue.key), queue.key in measured)
            for queue, rules in zip(stats, settings, strict=True)
        }
        workers = await control.workers()
        return Snapshot(
            number=number, at=backend.now(), readings=readings, workers=workers, health=health
        )

    async def _settings(self, keys: Sequence[str]) -> list[QueueSettings]:
        """Return the settings of the queues. Those of many queues are read again only after a while."""
        now = time.monotonic()
        if len(keys) <= LISTED or now >= self._rules_until:
            self._rules, self._rules_until = {}, now + _RULES_SECONDS
        new = [key for key in keys if key not in self._rules]
        read = await read_each(self._control.settings, new, _MAX_CONCURRENT)
        self._rules.update(zip(new, read, strict=True))
        return [self._rules[key] for key in keys]

    def _recent(self, measured: dict[str, Percentiles], now: float) -> dict[str, Percentiles]:
        for key, result in measured.items():
            self._run_times[key] = (now, result)
        for key, (at, _) in list(self._run_times.items()):
            if now - at > _HISTORY_SECONDS:
                del self._run_times[key]
        return {key: result for key, (_, result) in self._run_times.items()}


def _ending() -> ProblemError:
    return ProblemError(
        503, "draining", "this server is shutting down", headers={"retry-after": "1"}
    )
