"""Metrics of this process: latencies, outcomes, refusals, requests and connections."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge

from taskqueue_core.capabilities import Maintained
from taskqueue_core.hooks import hookimpl
from taskqueue_core.retry import Bury
from taskqueue_core.schedules import SkipReason
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, Settled

OTHER = "(other)"
"""label for all queues, paths and reasons without a label of their own; no queue can have this name"""
MAX_KEYS = 100
"""maximum number of queues whose latencies have a label of their own: the first queues that had a delivery"""
BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 600.0, 3600.0)
"""upper bounds of the buckets of task latencies, in seconds"""
FINE_BOUNDS = tuple(
    sorted(
        {
            *BOUNDS,
            *(
                round(step * 10.0**power, 7)
                for power in range(-4, 4)
                for step in (1, 1.5, 2, 3, 5, 7)
            ),
        }
    )
)
"""upper bounds of the buckets in which latencies are counted: fine enough for percentiles; scrapes get the sums"""
_COARSE = [bisect_left(BOUNDS, bound) for bound in (*FINE_BOUNDS, float("inf"))]
"""for each fine bucket, the index of the exported bucket that includes it"""
_REQUEST_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
_ENDS = ("bye", "silent", "restart", "internal", "cancelled", "revoked", "closed with 1006")
"""reasons for a disconnect that have a label of their own; any other reason may be text that the client sent"""
_OUTCOMES = {"ack": "done", "redeliver": "returned", "lost": "lost"}
_LOST = "max_losses_exceeded"
# These are module globals, because attribute lookups on enum classes would dominate the cost of the hooks.
_ACCEPTED, _DUPLICATE, _REPLACED, _OK, _STALE = (
    Published.ACCEPTED,
    Published.DUPLICATE,
    Published.REPLACED,
    Settled.OK,
    Settled.LEASE_LOST,
)
_REFUSED = {*Refusal, "conflict"}
_SKIPPED = {*SkipReason, *Refusal} - {SkipReason.REFUSED}


class _Tally:
    """Latencies of one queue since the process started, and how many of them were exported."""

    __slots__ = ("counts", "exported", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(FINE_BOUNDS) + 1)
        self.exported = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def take(self) -> tuple[list[int], float]:
        """Return what was not exported yet: the numbers by exported bucket, and the sum of the seconds."""
        new = [-number for number in self.exported]
        for index, number in zip(_COARSE, self.counts, strict=True):
            new[index] += number
        self.exported = [old + more for old, more in zip(self.exported, new, strict=True)]
        seconds, self.seconds = self.seconds, 0.0
        return new, seconds

    def note(self, *latencies: float) -> None:
        counts, total = self.counts, 0.0
        for seconds in latencies:
            counts[bisect_left(FINE_BOUNDS, seconds)] += 1
            if seconds > 0:  # the latency may be negative if the clocks of two machines differ
                total += seconds
        self.seconds += total


class _Latency(prometheus_client.Histogram):
    """A histogram that accepts many observations at once."""

    def add(self, tally: _Tally) -> None:
        """Add the observations of a tally that were not added yet."""
        numbers, seconds = tally.take()
        self._sum.inc(seconds)
        for bucket, number in zip(self._buckets, numbers, strict=True):
            if number:
                bucket.inc(number)


class _Latencies:
    """A latency histogram with a label for each queue."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._histogram = _Latency(name, text, ["key"], registry=registry, buckets=BOUNDS)
        self._tallies: dict[str, _Tally] = {}

    def of(self, key: str) -> _Tally:
        """Return the queue's tally of latencies since the last flush."""
        tally = self._tallies.get(key)
        if tally is None:
            if len(self._tallies) >= MAX_KEYS:
                key = OTHER
            tally = self._tallies.setdefault(key, _Tally())
        return tally

    def counts(self) -> dict[str, Sequence[int]]:
        """Return the number of latencies in each bucket of `FINE_BOUNDS` so far, by queue."""
        return {key: tally.counts for key, tally in self._tallies.items()}

    def flush(self) -> None:
        for key, tally in self._tallies.items():
            if any(tally.counts):
                self._histogram.labels(key).add(tally)


class ProcessMetrics:
    """Hooks and methods that count tasks, connections and requests in this process. ``now`` gives the store's time."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], float]) -> None:
        self._now = now

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry, multiprocess_mode="livesum")

        self._wait = _Latencies(
            "taskqueue_task_wait_seconds",
            "Time from when a task could be delivered (published, due or released) to its delivery.",
            registry,
        )
        self._run = _Latencies(
            "taskqueue_task_run_seconds",
            "Time from a delivery to the outcome that its worker reports; released tasks are not counted.",
            registry,
        )
        self._whole = _Latencies(
            "taskqueue_task_end_to_end_seconds",
            "Time from when a task could be delivered to its success.",
            registry,
        )
        self._refused = counter(
            "taskqueue_publish_refused",
            "Tasks refused when they were published, by reason code.",
            "code",
        )
        self._settled = counter(
            "taskqueue_settled", "Deliveries that ended, by outcome.", "outcome"
        )
        self._outcomes: Counts[str] = Counts()
        self._skipped = counter(
            "taskqueue_schedule_skipped",
            "Instants of schedules for which no task was published, by reason.",
            "reason",
        )
        self._passes = counter(
            "taskqueue_housekeeping_passes", "Maintenance runs, by result.", "result"
        )
        self._behind = Gauge(
            "taskqueue_housekeeping_behind_seconds",
            "How long the oldest work that maintenance left undone has been due; 0 if none is left.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._requests = counter(
            "taskqueue_http_requests",
            "HTTP requests, by method, API path and status class.",
            *("method", "path", "status"),
        )
        self._request_seconds = prometheus_client.Histogram(
            "taskqueue_http_request_seconds",
            "Time from the head of an HTTP request to the end of its response.",
            ["method", "path"],
            registry=registry,
            buckets=_REQUEST_BOUNDS,
        )
        self._closes = counter(
            "taskqueue_sockets_ended",
            "Sockets that this server refused, by HTTP status, or closed, by close code.",
            "code",
        )
        self._ends = counter(
            "taskqueue_connections_ended", "Closed connections of workers, by reason.", "reason"
        )
        self.connections = gauge(
            "taskqueue_connections", "Open sockets of workers, by state.", "state"
        )
        self.credit = gauge("taskqueue_credit_tasks", "Deliveries that workers still accept.")
        self.held = gauge("taskqueue_held_tasks", "Deliveries that connected workers hold.")
        self.long_polls = gauge(
            "taskqueue_long_polls", "HTTP requests that wait for a task to end."
        )

    @hookimpl
    def published(self, confirmations: Sequence[Confirmation]) -> None:
        """Count refused tasks, including those whose id was already used with another payload."""
        for confirmation in confirmations:
            status = confirmation.status
            if status is _ACCEPTED or status is _DUPLICATE or status is _REPLACED:
                continue
            code = (
                _known(confirmation.code, _REFUSED) if status is Published.REFUSED else "conflict"
            )
            self._refused.labels(code).inc()

    @hookimpl
    def schedule_skipped(self, reason: str, count: int) -> None:
        """Count instants of a schedule for which this process published no task."""
        self._skipped.labels(_known(reason, _SKIPPED)).inc(count)

    @hookimpl
    def delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Record the time that tasks waited."""
        for key, some in _by_key(deliveries):
            waits = [d.delivered_at - d.waiting_since for d in some if d.waiting_since is not None]
            self._wait.of(key).note(*waits)

    @hookimpl
    def settled(
        self, deliveries: Sequence[Delivery], verb: str, outcomes: Sequence[Settled]
    ) -> None:
        """Count settled and stale deliveries, and record the latencies of acked deliveries."""
        now = self._now()
        # An outcome that is neither is a dead letter, which `dead_lettered` counts.
        done = [d for d, outcome in zip(deliveries, outcomes, strict=True) if outcome is _OK]
        self._outcomes[_OUTCOMES[verb]] += len(done)
        self._outcomes["stale"] += outcomes.count(_STALE)
        if verb == "ack":
            for key, some in _by_key(done):
                self._run.of(key).note(*[now - d.delivered_at for d in some])
                waits = [now - d.waiting_since for d in some if d.waiting_since is not None]
                self._whole.of(key).note(*waits)

    @hookimpl
    def retry_scheduled(self, settles: Delivery | None) -> None:
        """Count a retry that ends a delivery, and record the run time of the failed attempt."""
        if settles is not None:
            self._outcomes["retried"] += 1
            self._run.of(settles.task.key).note(self._now() - settles.delivered_at)

    @hookimpl
    def dead_lettered(self, delivery: Delivery, verdict: Bury) -> None:
        """Count the dead letter, and record the run time of its last attempt unless that attempt was lost."""
        self._outcomes["dead"] += 1
        if verdict.reason != _LOST:
            self._run.of(delivery.task.key).note(self._now() - delivery.delivered_at)

    @hookimpl
    def maintained(self, done: Maintained | None) -> None:
        """Count a maintenance run, and export how long the work that it left undone has been due."""
        self._passes.labels("failed" if done is None else "ok").inc()
        if done is not None:
            self._behind.set(done.behind or 0)

    @hookimpl
    def worker_disconnected(self, reason: str) -> None:
        """Count a closed connection."""
        self._ends.labels(_known(reason, _ENDS)).inc()

    def request(self, method: str, path: str, status: int, seconds: float) -> None:
        """Record an HTTP request. ``method`` and ``path`` are those of the operation, not the client's text."""
        self._requests.labels(method, path, f"{status // 100}xx").inc()
        self._request_seconds.labels(method, path).observe(seconds)

    def socket_ended(self, code: int) -> None:
        """Count a socket that this server closed or refused, by close code or HTTP status."""
        self._closes.labels(str(code)).inc()

    def run_times(self) -> dict[str, Sequence[int]]:
        """Return the number of run times in each bucket of `FINE_BOUNDS` since the process started, by queue."""
        return self._run.counts()

    def flush(self) -> None:
        """Export the latencies and outcomes that were counted since the last flush."""
        for latencies in (self._wait, self._run, self._whole):
            latencies.flush()
        for outcome, number in self._outcomes.items():
            self._settled.labels(outcome).inc(number)
        self._outcomes.clear()


def _by_key(deliveries: Sequence[Delivery]) -> Iterator[tuple[str, Iterable[Delivery]]]:
    """Yield deliveries by key. Most calls have one key only."""
    keys = {delivery.task.key for delivery in deliveries}
    for key in keys:
        yield key, deliveries if len(keys) == 1 else [d for d in deliveries if d.task.key == key]


def _known(name: Any, names: Any) -> str:
    """Return the name if it is known, otherwise `OTHER`, so that clients cannot create labels."""
    return str(name) if name in names else OTHER
