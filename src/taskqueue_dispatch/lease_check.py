"""Asks servers what they run, and holds the pool's leases against that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio

from taskqueue_core.capabilities import Endpoint, EndpointInfo, Seen, SlotLease, SlotPool
from taskqueue_core.errors import TaskQueueError
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.registry import ModelRegistry

_AT_ONCE = 32
_JITTER = 0.2
_POLL_SECONDS = 1.0
"""seconds until an endpoint is asked again of which one answer does not tell enough"""
_IN_A_ROW = 2
"""so many failures make an endpoint unwell"""
_log = logging.getLogger("taskqueue.dispatch")
_Name = tuple[str, str]


class HealthClient(Protocol):
    """What asks a server how it is: `taskqueue_dispatch.endpoint_client.client.Caller`."""

    async def health(self, endpoint: Endpoint, config: ModelConfig) -> Seen | None:
        """Return what the server says; ``None`` for one that does not answer, or says nothing of use."""
        ...


class _Watch:
    """What is remembered of an endpoint."""

    __slots__ = ("asking", "due", "failures")

    def __init__(self, due: float) -> None:
        self.due = due
        self.failures = 0
        self.asking = False


class Checks:
    """Looks at each known endpoint every ``health_interval``, and at a new one at once.

    One that does not report is left alone. One failure is looked at again before the pool hears of it.
    """

    def __init__(
        self,
        pool: SlotPool,
        registry: ModelRegistry,
        caller: HealthClient,
        settings: DispatchSettings,
        *,
        ended: Callable[[Sequence[SlotLease]], None],
        monotonic: Callable[[], float],
        uniform: Callable[[], float],
    ) -> None:
        """Do no input or output. ``ended`` is told of leases that ended by a check."""
        self._pool = pool
        self._registry = registry
        self._caller = caller
        self._settings = settings
        self._ended = ended
        self._monotonic = monotonic
        self._uniform = uniform
        self._watches: dict[_Name, _Watch] = {}
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._stirred = asyncio.Event()
        self._failing = False
        self._epoch: str | None = None
        registry.listen(self._stirred.set)

    def poke(self, model: str, server: str) -> None:
        """Look at an endpoint soon. One that is not known is passed over."""
        if (watch := self._watches.get((model, server))) is not None:
            watch.due = self._monotonic()
            self._stirred.set()

    async def run(self) -> None:
        """Check until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._stirred.clear()
                for info, config, watch in self.due():
                    group.create_task(self.check(info, config, watch))
                await self._rest()

    async def _rest(self) -> None:
        waiting = (watch.due for watch in self._watches.values() if not watch.asking)
        until = min(waiting, default=math.inf) - self._monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(until, self._settings.health_interval))):
                await self._stirred.wait()

    def due(self) -> list[tuple[EndpointInfo, ModelConfig, _Watch]]:
        """Return whom to ask now, and count them as being asked; forget those that are not known any more."""
        now = self._monotonic()
        if self._registry.epoch != self._epoch:  # the pool knows of nobody how it is
            self._epoch = self._registry.epoch
            self._watches = {name: watch for name, watch in self._watches.items() if watch.asking}
        known: dict[_Name, tuple[EndpointInfo, ModelConfig]] = {
            (view.model, info.endpoint.server): (info, view.config)
            for view in self._registry.known()
            for info in view.endpoints
            if info.endpoint.reports
        }
        self._watches = {name: self._watches.get(name) or _Watch(now) for name in known}
        matches = []
        for name, (info, config) in known.items():
            watch = self._watches[name]
            if not watch.asking and watch.due <= now:
                watch.asking, watch.due = True, math.inf
                matches.append((info, config, watch))
        return matches

    async def check(self, info: EndpointInfo, config: ModelConfig, watch: _Watch) -> None:
        """Ask a server, tell the pool, and say when to ask again. What goes wrong is logged, once in a row."""
        after = self._settings.health_interval
        try:
            async with self._room:
                after = await self._check(info, config, watch)
            self._failing = False
        except TaskQueueError as error:
            if not self._failing:
                _log.warning("could not reconcile slots", extra={"code": error.code})
            self._failing = True
        except Exception:  # noqa: BLE001 - the loop must not end silently
            _log.exception("could not check an endpoint")
        finally:
            jitter = 1 + _JITTER * (2 * self._uniform() - 1)
            # One that was poked meanwhile is due already.
            watch.due = min(watch.due, self._monotonic() + after * jitter)
            watch.asking = False
            self._stirred.set()

    async def _check(self, info: EndpointInfo, config: ModelConfig, watch: _Watch) -> float:
        """Return the seconds until the next look."""
        endpoint, settings = info.endpoint, self._settings
        observed = await self._ask(info, config)
        if observed is None:
            watch.failures += 1
            if watch.failures < _IN_A_ROW:
                return min(_POLL_SECONDS, settings.health_interval)
        else:
            watch.failures = 0
        ended = await self._pool.reconcile(
            endpoint.model, endpoint.server, observed, settled=settings.settled
        )
        if ended:
            figures = {"model": endpoint.model, "server": endpoint.server, "leases": len(ended)}
            _log.warning("released slots whose jobs do not run on their server", extra=figures)
            self._ended(ended)
        if observed is not None and (info.overdue or (observed.active and not info.healthy)):
            return min(settings.settled, settings.health_interval)  # a second look tells
        return settings.health_interval

    async def _ask(self, info: EndpointInfo, config: ModelConfig) -> Seen | None:
        try:
            with anyio.fail_after(self._settings.health_interval):  # not asyncio's: see `Caller`
                return await self._caller.health(info.endpoint, config)
        except TimeoutError:
            return None
