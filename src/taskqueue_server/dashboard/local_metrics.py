"""Metrics of the tasks that pass through this process: their run times, and counts by tenant."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from taskqueue_core.hooks import hookimpl
from taskqueue_core.tasks import Confirmation, Delivery, Settled, Task

_TIMES = 1000
"""maximum number of run times recorded per queue between samples; more would hardly change the percentiles"""
_KEYS = 1000
_TENANTS = 200
"""maximum number of tenants per queue; further tenants are counted together"""
RECENT = 20
"""number of run times that are kept of each tenant"""


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of the time from a delivery to its ack, in seconds."""

    p50: float
    p95: float


class TenantFlow(msgspec.Struct):
    """Counts of one tenant's tasks since the dashboard began to poll the store."""

    published: int = 0
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


class ProcessGauges:
    """Hooks that record run times and count tasks by tenant. The numbers of keys, tenants and times are limited."""

    OTHERS = ""
    """name under which queues and tenants beyond the limits are counted"""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._times: dict[str, list[float]] = {}
        self._tenants: dict[str, dict[str, TenantFlow]] = {}

    def take(self) -> dict[str, Percentiles]:
        """Return the percentiles of each queue's run times since the last call."""
        times, self._times = self._times, {}
        return {key: _percentiles(time) for key, time in times.items()}

    def tenants(self, key: str) -> dict[str, TenantFlow]:
        """Return the counts of each tenant of a queue."""
        return dict(self._tenants.get(key, {}))

    @hookimpl
    def published(self, tasks: Sequence[Task], confirmations: Sequence[Confirmation]) -> None:
        """Count stored tasks by tenant."""
        for task, confirmation in zip(tasks, confirmations, strict=False):
            if task.tenant is not None and confirmation.stored:
                self._flow(task).published += 1

    @hookimpl
    def delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries by tenant."""
        for delivery in deliveries:
            if delivery.task.tenant is not None:
                self._flow(delivery.task).delivered += 1

    @hookimpl
    def settled(
        self, deliveries: Sequence[Delivery], verb: str, outcomes: Sequence[Settled]
    ) -> None:
        """Record the run time of acked deliveries, and count them by tenant."""
        if verb != "ack":
            return
        now = self._now()
        for delivery, outcome in zip(deliveries, outcomes, strict=False):
            if outcome is not Settled.OK:
                continue
            task, run_time = delivery.task, max(0.0, now - delivery.delivered_at)
            if task.key in self._times or len(self._times) < _KEYS:
                times = self._times.setdefault(task.key, [])
                if len(times) < _TIMES:
                    times.append(run_time)
            if task.tenant is not None:
                self._flow(task).acked(run_time)

    def _flow(self, task: Task) -> TenantFlow:
        key = task.key if task.key in self._tenants or len(self._tenants) < _KEYS else self.OTHERS
        tenants = self._tenants.setdefault(key, {})
        tenant = task.tenant or self.OTHERS
        if tenant not in tenants and len(tenants) >= _TENANTS:
            tenant = self.OTHERS
        return tenants.setdefault(tenant, TenantFlow())


def _percentiles(times: list[float]) -> Percentiles:
    times.sort()
    last = len(times) - 1
    return Percentiles(times[last // 2], times[min(last, len(times) * 95 // 100)])
