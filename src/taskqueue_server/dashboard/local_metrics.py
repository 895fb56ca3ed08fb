"""Metrics of the tasks that pass through this process: their run times, and counts by tenant."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

import msgspec

from taskqueue_core.hooks import hookimpl
from taskqueue_core.tasks import Delivery, Settled

_TIMES = 1000
"""maximum number of run times recorded per queue between samples; more would hardly change the percentiles"""
_KEYS = 1000
_TENANTS = 200
"""maximum number of tenants that are kept per queue"""
_ALL_TENANTS = 10_000
"""maximum number of tenants that are kept in all queues: at most 6 MB"""
RECENT = 20
"""number of run times that are kept of each tenant"""


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of the time from a delivery to its ack, in seconds."""

    p50: float
    p95: float


class TenantFlow(msgspec.Struct):
    """Counts of one tenant's tasks since the server started, or since the tenant was last dropped."""

    delivered: int = 0
    done: int = 0
    times: array[float] = msgspec.field(default_factory=lambda: array("f"))
    """the last run times, in seconds, in any order"""

    def acked(self, run_time: float) -> None:
        """Count a task that is done."""
        if len(self.times) < RECENT:
            self.times.append(run_time)
        else:
            self.times[self.done % RECENT] = run_time
        self.done += 1

    @property
    def run_time(self) -> float | None:
        """The median of the last run times."""
        return sorted(self.times)[(len(self.times) - 1) // 2] if self.times else None


_NONE: Mapping[str, TenantFlow] = {}


class TenantFlows:
    """Hooks that count tasks by tenant while the server runs. Of too many tenants, those that were seen last stay."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.since = now()
        """time by the store's clock at which the counts began"""
        self._queues: dict[str, dict[str, TenantFlow]] = {}
        """the tenants of each queue; queues and tenants that were seen last are at the end"""
        self._count = 0

    def of(self, key: str) -> dict[str, TenantFlow]:
        """Return the counts of each tenant of a queue."""
        return dict(self._queues.get(key, {}))

    @hookimpl
    def delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries by tenant."""
        for delivery in deliveries:
            if delivery.task.tenant is not None:
                self._flow(delivery.task.key, delivery.task.tenant).delivered += 1

    @hookimpl
    def settled(
        self, deliveries: Sequence[Delivery], verb: str, outcomes: Sequence[Settled]
    ) -> None:
        """Count acked deliveries by tenant, and keep their run times."""
        if verb != "ack":
            return
        now = self._now()
        for delivery, outcome in zip(deliveries, outcomes, strict=False):
            task = delivery.task
            if task.tenant is not None and outcome is Settled.OK:
                # A delivery has moved the tenant to the end; to do it again here would only take time.
                flow = self._queues.get(task.key, _NONE).get(task.tenant)
                if flow is None:
                    flow = self._flow(task.key, task.tenant)
                flow.acked(max(0.0, now - delivery.delivered_at))

    def _flow(self, key: str, tenant: str) -> TenantFlow:
        tenants = self._queues.pop(key, None)
        if tenants is None:
            tenants = {}
        self._queues[key] = tenants
        flow = tenants.pop(tenant, None)
        if flow is None:
            flow = TenantFlow()
            self._count += 1
            if len(tenants) == _TENANTS:
                del tenants[next(iter(tenants))]
                self._count -= 1
        tenants[tenant] = flow
        while self._count > _ALL_TENANTS:
            self._count -= len(self._queues.pop(next(iter(self._queues))))
        return flow


class ProcessGauges:
    """Hooks that record the run times of queues. The numbers of queues and times are limited."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._times: dict[str, list[float]] = {}

    def take(self) -> dict[str, Percentiles]:
        """Return the percentiles of each queue's run times since the last call."""
        times, self._times = self._times, {}
        return {key: _percentiles(time) for key, time in times.items()}

    @hookimpl
    def settled(
        self, deliveries: Sequence[Delivery], verb: str, outcomes: Sequence[Settled]
    ) -> None:
        """Record the run times of acked deliveries."""
        if verb != "ack":
            return
        now = self._now()
        for delivery, outcome in zip(deliveries, outcomes, strict=False):
            key = delivery.task.key
            if outcome is Settled.OK and (key in self._times or len(self._times) < _KEYS):
                times = self._times.setdefault(key, [])
                if len(times) < _TIMES:
                    times.append(max(0.0, now - delivery.delivered_at))


def _percentiles(times: list[float]) -> Percentiles:
    times.sort()
    last = len(times) - 1
    return Percentiles(times[last // 2], times[min(last, len(times) * 95 // 100)])
