"""Health checks of endpoints: each server reports its running jobs, which are compared with the leases in the pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from taskqueue_core.capabilities import Endpoint, EndpointInfo, Seen, SlotLease, SlotPool
from taskqueue_core.errors import TaskQueueError
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.registry import ModelRegistry

_MAX_CONCURRENT = 32
_JITTER = 0.2
_POLL_SECONDS = 1.0
"""seconds after which an endpoint is checked again after a first failure"""
_MAX_FAILURES = 2
"""number of consecutive failures after which an endpoint is unhealthy"""
_log = logging.getLogger("taskqueue.dispatch")
_Name = tuple[str, str]


class HealthClient(Protocol):
    """The interface of a client that checks the health of GPU servers."""

    async def health(self, endpoint: Endpoint, config: ModelConfig) -> Seen | None:
        """Return the server's report, or ``None`` if the server does not answer or its answer is not valid."""
        ...


@dataclass(eq=False, slots=True)
class _Watch:
    """The state of the health checks of one endpoint."""

    due: float
    failures: int = 0
    answered_at: float = 0.0
    """time of the last answer, or of the first check"""
    asking: bool = False


class Checks:
    """The health checks of all endpoints, every ``health_interval`` seconds. A new endpoint is checked at once.

    Endpoints registered with ``reports=False`` are not checked. After a first failure, the endpoint is checked again
    before the pool is updated.
    """

    def __init__(
        self,
        pool: SlotPool,
        registry: ModelRegistry,
        caller: HealthClient,
        settings: DispatchSettings,
        *,
        held: Callable[[], Iterable[SlotLease]],
        ended: Callable[[Sequence[SlotLease]], None],
        monotonic: Callable[[], float],
        uniform: Callable[[], float],
    ) -> None:
        """Create the checks without any I/O.

        ``held`` returns the leases that this process holds. ``ended`` is called with the leases that a check has ended.
        """
        self._pool = pool
        self._registry = registry
        self._caller = caller
        self._settings = settings
        self._held = held
        self._ended = ended
        self._monotonic = monotonic
        self._uniform = uniform
        self._watches: dict[_Name, _Watch] = {}
        self._room = asyncio.Semaphore(_MAX_CONCURRENT)
        self._wake_up = asyncio.Event()
        self._failing = False
        self._epoch: str | None = None
        registry.listen(self._wake_up.set)

    def check_soon(self, model: str, server: str) -> None:
        """Check an endpoint as soon as possible. An unknown endpoint is ignored."""
        if (watch := self._watches.get((model, server))) is not None:
            watch.due = self._monotonic()
            self._wake_up.set()

    def silence(self, name: tuple[str, str]) -> float:
        """Return for how many seconds an endpoint's server has answered no check; infinity if it is not checked."""
        watch = self._watches.get(name)
        if watch is None:
            return math.inf
        return self._monotonic() - watch.answered_at if watch.failures else 0.0

    async def run(self) -> None:
        """Run the checks until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake_up.clear()
                for info, config, watch in self.due():
                    group.create_task(self.check(info, config, watch))
                await self._wait()

    async def _wait(self) -> None:
        waiting = (watch.due for watch in self._watches.values() if not watch.asking)
        until = min(waiting, default=math.inf) - self._monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(until, self._settings.health_interval))):
                await self._wake_up.wait()

    def due(self) -> list[tuple[EndpointInfo, ModelConfig, _Watch]]:
        """Return the endpoints that are due and mark them as being checked. Forget endpoints that no longer exist."""
        now = self._monotonic()
        # A new epoch means that the pool was emptied, so check all endpoints at once: their health is unknown.
        if self._registry.epoch != self._epoch:
            self._epoch = self._registry.epoch
            self._watches = {name: watch for name, watch in self._watches.items() if watch.asking}
        known: dict[_Name, tuple[EndpointInfo, ModelConfig]] = {
            (view.model, info.endpoint.server): (info, view.config)
            for view in self._registry.known()
            for info in view.endpoints
            if info.endpoint.reports
        }
        self._watches = {
            name: self._watches.get(name) or _Watch(now, answered_at=now) for name in known
        }
        matches = []
        for name, (info, config) in known.items():
            watch = self._watches[name]
            if not watch.asking and watch.due <= now:
                watch.asking, watch.due = True, math.inf
                matches.append((info, config, watch))
        return matches

    async def check(self, info: EndpointInfo, config: ModelConfig, watch: _Watch) -> None:
        """Check a server, update the pool, and schedule the next check.

        Of consecutive errors of the store, only the first is logged.
        """
        after = self._settings.health_interval
        try:
            async with self._room:
                after = await self._check(info, config, watch)
            self._failing = False
        except TaskQueueError as error:
            if not self._failing:
                _log.warning("could not reconcile slots", extra={"code": error.code})
            self._failing = True
        except Exception:  # noqa: BLE001 - an error must not end the checks
            _log.exception("could not check an endpoint")
        finally:
            # Keep an earlier time that `check_soon` may have set during the check.
            watch.due = min(watch.due, self._monotonic() + after)
            watch.asking = False
            self._wake_up.set()

    async def _check(self, info: EndpointInfo, config: ModelConfig, watch: _Watch) -> float:
        """Check an endpoint once, and return the seconds until the next check."""
        endpoint, settings = info.endpoint, self._settings
        interval = settings.health_interval * (1 + _JITTER * (2 * self._uniform() - 1))
        before, asked_at = self._bound(endpoint), self._monotonic()
        observed = await self._ask(info, config)
        # A report shows what the server ran when it was asked. It counts as the second report only if the server was
        # asked ``settled`` seconds after the first report.
        delay = self._monotonic() - asked_at
        if observed is None:
            watch.failures += 1
            if watch.failures < _MAX_FAILURES:
                return min(_POLL_SECONDS, interval)
        else:
            watch.failures, watch.answered_at = 0, self._monotonic()
        ended = await self._pool.reconcile(
            endpoint.model, endpoint.server, observed, settled=settings.settled + delay
        )
        if ended:
            figures = {"model": endpoint.model, "server": endpoint.server, "leases": len(ended)}
            _log.warning("released slots whose jobs are not running on the server", extra=figures)
            self._ended(ended)
        if observed is None:
            return interval
        again = info.overdue or (observed.active and not info.healthy)
        if again or await self._lacks(endpoint, observed, before):
            # Check again soon: a lease ends only at a second report, and some endpoints become healthy only at a second
            # report.
            return min(settings.settled, interval)
        return interval

    def _bound(self, endpoint: Endpoint) -> dict[int, str]:
        """Return the jobs of an endpoint, by fence, as far as this process knows."""
        leases = [*self._registry.leases, *self._held()]
        return {
            lease.fence: lease.job
            for lease in leases
            if lease.job is not None
            and (lease.model, lease.server) == (endpoint.model, endpoint.server)
        }

    async def _lacks(self, endpoint: Endpoint, observed: Seen, before: dict[int, str]) -> bool:
        """Return whether a job whose lease began before the report, and still exists, is missing from the report."""
        if observed.jobs is None and observed.active >= len(before):
            return False
        missing = {
            fence
            for fence, job in before.items()
            if observed.jobs is None or job not in observed.jobs
        }
        if not missing:
            return False
        leases = (await self._pool.inspect(endpoint.model)).leases
        missing &= {lease.fence for lease in leases}
        return bool(missing) if observed.jobs is not None else observed.active < len(missing)

    async def _ask(self, info: EndpointInfo, config: ModelConfig) -> Seen | None:
        try:
            # Use anyio's timeout instead of asyncio's, for the reason given in `EndpointClient._call`.
            with anyio.fail_after(self._settings.health_interval):
                return await self._caller.health(info.endpoint, config)
        except TimeoutError:
            return None
