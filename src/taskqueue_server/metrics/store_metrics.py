"""What the store says about its queues, the same on every replica. Read once for all who scrape at about one time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from taskqueue_core.capabilities import Control, QueueSettings
from taskqueue_core.tasks import Ledger, QueueStats, State
from taskqueue_server.context.server import read_each
from taskqueue_server.metrics.process_metrics import OTHER

MOST_LABELS = 200
"""queues with figures of their own: those in which most was published"""
_FRESH = 1.0
"""seconds for which what was read will do"""
_PATIENCE = 3.0
"""seconds that a scrape waits for the store"""
_PASS_SECONDS = 30.0
_STALE = 15.0
"""seconds after which what was read is no more told, if a pass takes so long"""
_TOGETHER = 50
"""queues that are asked about at once"""
_FLOW = {
    "published": "Tasks that were published.",
    "delivered": "Deliveries to workers.",
    "redelivered": "Deliveries that were released or lost.",
    "retried": "Retries that were scheduled.",
    "lost": "Deliveries lost because their worker was gone or their lease had expired.",
}


class StoreMetricsReader(msgspec.Struct, eq=False):
    """What one pass over the queues found."""

    read_at: float
    """of the event loop"""
    now: float
    """of the store"""
    queues: tuple[QueueStats, ...]
    settings: dict[str, QueueSettings]
    """of the queues that were asked about so far"""


class StoreMetrics:
    """Reads them, one pass at a time, however many ask."""

    def __init__(
        self, control: Control, now: Callable[[], float], patience: float = _PATIENCE
    ) -> None:
        """Read by ``control``, on a store whose time is ``now``. Who asks waits for ``patience`` seconds at most."""
        self._control = control
        self._now = now
        self._patience = patience
        self._last: StoreMetricsReader | None = None
        self._asked_at = float("-inf")
        self._pass: asyncio.Task[None] | None = None

    async def latest(self) -> StoreMetricsReader | None:
        """Return figures that are about a second old, or older if the store is slow; none where it is away."""
        loop = asyncio.get_running_loop()
        if self._pass is None and loop.time() - self._asked_at >= _FRESH:
            self._asked_at = loop.time()
            self._pass = asyncio.create_task(self._read())
        if self._pass is not None:
            await asyncio.wait([self._pass], timeout=self._patience)
        reader = self._last
        return None if reader is None or loop.time() - reader.read_at > _STALE else reader

    async def complete(self, metrics: StoreMetricsReader, keys: Sequence[str]) -> None:
        """Add the settings of some queues, as far as the store tells them in time."""
        missing = [key for key in keys if key not in metrics.settings]
        try:
            async with asyncio.timeout(self._patience):
                settings = await read_each(self._control.settings, missing, _TOGETHER)
        except Exception:  # noqa: BLE001 - the other figures are as good without
            return
        metrics.settings.update(zip(missing, settings, strict=True))

    async def close(self) -> None:
        """End a pass that is under way."""
        if self._pass is not None:
            self._pass.cancel()
            await asyncio.gather(self._pass, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(_PASS_SECONDS):
                keys = await self._control.queues()
                stats = await read_each(self._control.stats, keys, _TOGETHER)
        except Exception:  # noqa: BLE001 - that there are no figures says it
            self._last = None
        else:
            at = asyncio.get_running_loop().time()
            self._last = StoreMetricsReader(at, self._now(), tuple(stats), {})
        finally:
            self._pass = None


class Shown(msgspec.Struct, frozen=True):
    """What somebody may see of the figures: some queues by themselves, and the sum of the others."""

    queues: tuple[QueueStats, ...]
    others: tuple[QueueStats, ...]

    @classmethod
    def of(cls, metrics: StoreMetricsReader, may: Callable[[str], bool]) -> Shown:
        """Take the busiest queues that ``may`` be seen."""
        stats = [queue for queue in metrics.queues if may(queue.key)]
        if len(stats) > MOST_LABELS:
            stats.sort(key=lambda stats: (-stats.ledger.published, stats.key))
        return cls(tuple(stats[:MOST_LABELS]), tuple(stats[MOST_LABELS:]))

    @property
    def keys(self) -> list[str]:
        """The queues that are shown by themselves."""
        return [queue.key for queue in self.queues]


def _unclaimed(stats: QueueStats) -> bool:
    return stats.ledger.waiting > 0 and stats.subscribers == 0


def _age(stats: QueueStats, now: float) -> float:
    return 0.0 if stats.oldest_waiting is None else max(0.0, now - stats.oldest_waiting)


def _summed(others: Sequence[QueueStats]) -> QueueStats:
    """Add up what gauges tell."""
    names = Ledger.__struct_fields__
    ledger = Ledger(**{name: sum(getattr(item.ledger, name) for item in others) for name in names})
    return QueueStats(
        key=OTHER,
        ledger=ledger,
        oldest_waiting=min((o.oldest_waiting for o in others if o.oldest_waiting), default=None),
        subscribers=sum(item.subscribers for item in others),
    )


def families(metrics: StoreMetricsReader | None, shown: Shown | None) -> Iterator[Metric]:
    """Make the metrics. Without figures there is only one, that says so."""
    up = GaugeMetricFamily("taskqueue_store_up", "1 if the store answers, else 0.")
    up.add_metric([], 0 if metrics is None else 1)
    yield up
    if metrics is None or shown is None:
        return
    number = GaugeMetricFamily("taskqueue_queues", "Number of queues.")
    number.add_metric([], len(shown.queues) + len(shown.others))
    yield number
    rows = [*shown.queues, *([_summed(shown.others)] if shown.others else [])]
    # The sum of the others would go down with each queue that leaves them, which no counter may.
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


def _gauges(rows: Sequence[QueueStats], shown: Shown, now: float) -> Iterator[Metric]:
    tasks = GaugeMetricFamily(
        "taskqueue_queue_tasks",
        "Tasks by state; for ended states, all tasks so far.",
        labels=["key", "state"],
    )
    for row in rows:
        for state in State:
            tasks.add_metric([row.key, state.value], getattr(row.ledger, state.value))
    yield tasks
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
            "1 if tasks wait without any subscription, else 0.",
            lambda stats: (
                sum(map(_unclaimed, shown.others)) if stats.key == OTHER else int(_unclaimed(stats))
            ),
        ),
        "taskqueue_queue_imbalance_tasks": (
            "Published tasks minus all tasks accounted for; always 0.",
            lambda stats: stats.ledger.imbalance,
        ),
    }
    for name, (text, value) in columns.items():
        family = GaugeMetricFamily(name, text, labels=["key"])
        for one in rows:
            family.add_metric([one.key], value(one))
        yield family


_LIMITS: dict[str, tuple[str, Callable[[QueueSettings], float | None]]] = {
    "taskqueue_queue_max_inflight_tasks": (
        "Maximum number of tasks in flight; absent without a limit.",
        lambda settings: settings.max_inflight or None,
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


def _settings(shown: Shown, settings: dict[str, QueueSettings]) -> Iterator[Metric]:
    known = [(key, settings[key]) for key in shown.keys if key in settings]
    for name, (text, limit_of) in _LIMITS.items():
        family = GaugeMetricFamily(name, text, labels=["key"])
        for key, queue in known:
            if (limit := limit_of(queue)) is not None:
                family.add_metric([key], limit)
        yield family
    paused = GaugeMetricFamily(
        "taskqueue_queue_paused",
        "1 if deliveries or intake of the queue are paused, else 0.",
        labels=["key", "what"],
    )
    for key, queue in known:
        paused.add_metric([key, "deliveries"], int(queue.paused))
        paused.add_metric([key, "intake"], int(queue.intake_paused))
    yield paused
