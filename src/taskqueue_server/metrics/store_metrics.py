"""Metrics of the store's queues, which are the same on every server; concurrent scrapes share one read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from taskqueue_core.capabilities import Control, QueueSettings
from taskqueue_core.tasks import Ledger, QueueStats, State
from taskqueue_server.context.server import read_each
from taskqueue_server.metrics.process_metrics import OTHER

MAX_LABELS = 200
"""maximum number of queues with their own labels: those with the most published tasks"""
_FRESH_SECONDS = 1.0
"""seconds for which scrapes reuse the statistics of one read"""
_TIMEOUT = 3.0
"""maximum number of seconds that a scrape waits for the statistics, and again for the settings"""
_PASS_SECONDS = 30.0
_MAX_AGE_SECONDS = 15.0
"""maximum age in seconds of statistics that are exported"""
_MAX_CONCURRENT = 100
"""maximum number of concurrent calls to the store"""
_FLOW = {
    "published": "Tasks that were published.",
    "delivered": "Deliveries to workers.",
    "redelivered": "Deliveries that were released or lost.",
    "retried": "Retries that were scheduled.",
    "lost": "Deliveries lost because their worker was gone or their lease had expired.",
}


class StoreStatistics(msgspec.Struct, eq=False):
    """The statistics of all queues at one time."""

    read_at: float
    """time of the read, by the event loop's clock"""
    now: float
    """time of the read, by the store's clock"""
    queues: tuple[QueueStats, ...]
    settings: dict[str, QueueSettings]
    """the settings that scrapes have read so far, by queue"""


class StoreMetrics:
    """Reader of the store's statistics: one read at a time, shared by concurrent scrapes."""

    def __init__(
        self, control: Control, now: Callable[[], float], patience: float = _TIMEOUT
    ) -> None:
        """Create a reader. ``now`` gives the store's time. Each wait for the store takes up to ``patience`` seconds."""
        self._control = control
        self._now = now
        self._patience = patience
        self._last: StoreStatistics | None = None
        self._started_at = float("-inf")
        self._pass: asyncio.Task[None] | None = None

    async def latest(self) -> StoreStatistics | None:
        """Return statistics at most about 1 s old, or up to 15 s if the store is slow; ``None`` if there are none."""
        loop = asyncio.get_running_loop()
        if self._pass is None and loop.time() - self._started_at >= _FRESH_SECONDS:
            self._started_at = loop.time()
            self._pass = asyncio.create_task(self._read())
        if self._pass is not None:
            await asyncio.wait([self._pass], timeout=self._patience)
        reader = self._last
        return None if reader is None or loop.time() - reader.read_at > _MAX_AGE_SECONDS else reader

    async def complete(self, metrics: StoreStatistics, keys: Sequence[str]) -> None:
        """Add the settings of these queues to ``metrics``, if the store returns them in time."""
        missing = [key for key in keys if key not in metrics.settings]
        try:
            async with asyncio.timeout(self._patience):
                settings = await read_each(self._control.settings, missing, _MAX_CONCURRENT)
        except Exception:  # noqa: BLE001 - the other metrics are valid without settings
            return
        metrics.settings.update(zip(missing, settings, strict=True))

    async def close(self) -> None:
        """Cancel a read in progress."""
        if self._pass is not None:
            self._pass.cancel()
            await asyncio.gather(self._pass, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(_PASS_SECONDS):
                keys = await self._control.queues()
                stats = await read_each(self._control.stats, keys, _MAX_CONCURRENT)
        except Exception:  # noqa: BLE001 - the metric taskqueue_store_up reports the failure
            self._last = None
        else:
            at = asyncio.get_running_loop().time()
            self._last = StoreStatistics(at, self._now(), tuple(stats), {})
        finally:
            self._pass = None


class VisibleStatistics(msgspec.Struct, frozen=True):
    """The statistics that an identity may see: ``queues`` are exported by name, and ``others`` as a sum."""

    queues: tuple[QueueStats, ...]
    others: tuple[QueueStats, ...]

    @classmethod
    def of(cls, metrics: StoreStatistics, may: Callable[[str], bool]) -> VisibleStatistics:
        """Select the queues for which ``may`` is true. Those with the most published tasks are exported by name."""
        stats = [queue for queue in metrics.queues if may(queue.key)]
        if len(stats) > MAX_LABELS:
            stats.sort(key=lambda stats: (-stats.ledger.published, stats.key))
        return cls(tuple(stats[:MAX_LABELS]), tuple(stats[MAX_LABELS:]))

    @property
    def keys(self) -> list[str]:
        """The queues that are exported by name."""
        return [queue.key for queue in self.queues]


def _unclaimed(stats: QueueStats) -> bool:
    return stats.ledger.waiting > 0 and stats.subscribers == 0


def _age(stats: QueueStats, now: float) -> float:
    return 0.0 if stats.oldest_waiting is None else max(0.0, now - stats.oldest_waiting)


def _summed(others: Sequence[QueueStats]) -> QueueStats:
    """Return the sum of the statistics of the queues that are not exported by name."""
    names = Ledger.__struct_fields__
    ledger = Ledger(**{name: sum(getattr(item.ledger, name) for item in others) for name in names})
    return QueueStats(
        key=OTHER,
        ledger=ledger,
        oldest_waiting=min((o.oldest_waiting for o in others if o.oldest_waiting), default=None),
        subscribers=sum(item.subscribers for item in others),
        blocked_on_dead=sum(item.blocked_on_dead for item in others),
    )


def families(metrics: StoreStatistics | None, shown: VisibleStatistics | None) -> Iterator[Metric]:
    """Yield the metrics. Without statistics, yield only ``taskqueue_store_up``."""
    up = metrics is not None
    yield GaugeMetricFamily("taskqueue_store_up", "1 if the store answers, else 0.", int(up))
    if metrics is None or shown is None:
        return
    number = len(shown.queues) + len(shown.others)
    yield GaugeMetricFamily("taskqueue_queues", "Number of queues.", number)
    rows = [*shown.queues, *([_summed(shown.others)] if shown.others else [])]
    # Counters are exported for named queues only: the sum of the other queues would decrease when one of them got a
    # label.
    yield from _counters(shown.queues)
    yield from _gauges(rows, shown, metrics.now)
    yield from _settings(shown, metrics.settings)


def _counters(rows: Sequence[QueueStats]) -> Iterator[Metric]:
    for name, text in _FLOW.items():
        family = CounterMetricFamily(f"taskqueue_{name}", text, labels=["key"])
        for row in rows:
            source = row.ledger if name == "published" else row
            family.add_metric([row.key], getattr(source, name))
        yield family


def _gauge(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def _gauges(rows: Sequence[QueueStats], shown: VisibleStatistics, now: float) -> Iterator[Metric]:
    yield _gauge(
        "taskqueue_queue_tasks",
        "Tasks by state; tasks in a final state such as done stay counted after the queue has forgotten them.",
        ["key", "state"],
        (((row.key, state), getattr(row.ledger, state)) for row in rows for state in State),
    )
    columns: dict[str, tuple[str, Callable[[QueueStats], float]]] = {
        "taskqueue_queue_oldest_age_seconds": (
            "Age of the oldest waiting task; 0 if none waits.",
            lambda stats: _age(stats, now),
        ),
        "taskqueue_queue_subscribers": (
            "Open subscriptions, on all replicas.",
            lambda stats: stats.subscribers,
        ),
        "taskqueue_queue_unclaimed": (
            "1 if tasks wait but no worker subscribes to the queue, else 0; for (other), the number of such queues.",
            lambda stats: (
                sum(map(_unclaimed, shown.others)) if stats.key == OTHER else int(_unclaimed(stats))
            ),
        ),
        "taskqueue_blocked_on_dead": (
            "Blocked tasks that dead letters hold until they are redriven or discarded.",
            lambda stats: stats.blocked_on_dead,
        ),
        "taskqueue_queue_imbalance_tasks": (
            "Published tasks minus all tasks accounted for; should be 0.",
            lambda stats: stats.ledger.imbalance,
        ),
    }
    for name, (text, value) in columns.items():
        yield _gauge(name, text, ["key"], [((queue.key,), value(queue)) for queue in rows])


_LIMITS: dict[str, tuple[str, Callable[[QueueSettings], float | None]]] = {
    "taskqueue_queue_max_inflight_tasks": (
        "Maximum number of tasks in flight; absent without a limit.",
        lambda settings: settings.max_inflight,
    ),
    "taskqueue_queue_rate_limit_tasks_per_second": (
        "Maximum deliveries per second; absent without a limit.",
        lambda settings: (
            None if (rate := settings.rate_limit) is None else rate.max_tokens / rate.period
        ),
    ),
    "taskqueue_queue_capacity_tasks": (
        "Maximum number of tasks not yet delivered; absent without a limit.",
        lambda settings: settings.capacity,
    ),
}


def _settings(shown: VisibleStatistics, settings: dict[str, QueueSettings]) -> Iterator[Metric]:
    known = [(key, settings[key]) for key in shown.keys if key in settings]
    for name, (text, limit_of) in _LIMITS.items():
        limits = [((key,), limit_of(queue)) for key, queue in known]
        present = ((of, limit) for of, limit in limits if limit is not None)
        yield _gauge(name, text, ["key"], present)
    paused = (
        ((key, what), int(value))
        for key, queue in known
        for what, value in (("deliveries", queue.paused), ("intake", queue.intake_paused))
    )
    text = (
        "1 if the queue's deliveries (what=deliveries) or intake (what=intake) are paused, else 0."
    )
    yield _gauge("taskqueue_queue_paused", text, ["key", "what"], paused)
