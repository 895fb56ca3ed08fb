"""The pool at one moment, read once for all who look."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter
from weakref import WeakKeyDictionary

import msgspec

from taskqueue_core.capabilities import EndpointInfo, PoolView, SlotLease
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.tasks import TaskStatus
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.service import Dispatcher
from taskqueue_server.dashboard.snapshot import Snapshot, StoreReading

JOBS = 50
"""running jobs that are listed, the latest"""
MODELS = 200
ENDPOINTS = 500
_PATIENCE = 5.0
_log = logging.getLogger("taskqueue.dispatch")


class ModelSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One model: what may run, and what its queue has."""

    name: str
    config: ModelConfig
    endpoints: tuple[EndpointInfo, ...]
    reading: StoreReading | None
    """``None`` before its first job"""

    @property
    def queue(self) -> str:
        """Its queue."""
        return queue_of(self.name)

    @property
    def slots(self) -> int:
        """How many jobs of it may run at once."""
        return sum(
            endpoint.endpoint.slots
            for endpoint in self.endpoints
            if not (endpoint.draining or endpoint.removed)
        )

    @property
    def free(self) -> int:
        """How many slots of endpoints that may get jobs have no holder."""
        return sum(endpoint.free for endpoint in self.endpoints if endpoint.usable)


class PoolSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows."""

    number: int
    at: float
    view: PoolView
    known: tuple[ModelSnapshot, ...] = ()
    """all models, by name"""
    statuses: dict[str, TaskStatus] = {}
    """of the jobs that are listed, by their ids"""
    error: str | None = None
    """why the pool could not be read; what is shown then is what was found before"""

    def seen_by(self, may: Callable[[str], bool]) -> PoolSnapshot:
        """Return what somebody may see of it."""
        names = {model.name for model in self.known if may(model.queue)}
        view = msgspec.structs.replace(
            self.view,
            endpoints=tuple(e for e in self.view.endpoints if e.endpoint.model in names),
            leases=tuple(lease for lease in self.view.leases if lease.model in names),
        )
        known = tuple(model for model in self.known if model.name in names)
        return msgspec.structs.replace(self, view=view, known=known)

    @property
    def models(self) -> tuple[ModelSnapshot, ...]:
        """The models that are listed."""
        return self.known[:MODELS]

    @property
    def endpoints(self) -> tuple[EndpointInfo, ...]:
        """The endpoints that are listed."""
        return self.view.endpoints[:ENDPOINTS]

    @property
    def jobs(self) -> list[SlotLease]:
        """The leases of the jobs that are listed, the latest first."""
        return _listed(self.view)


def _listed(view: PoolView) -> list[SlotLease]:
    bound = [lease for lease in view.leases if lease.job is not None]
    return sorted(bound, key=attrgetter("fence"), reverse=True)[:JOBS]


class _Watch:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.latest: PoolSnapshot | None = None


_watches: WeakKeyDictionary[Dispatcher, _Watch] = WeakKeyDictionary()


async def snapshot_of(dispatcher: Dispatcher, sample: Snapshot) -> PoolSnapshot:
    """Return the moment that belongs to a sample of the store: the same for all who ask."""
    watch = _watches.setdefault(dispatcher, _Watch())
    async with watch.lock:
        if watch.latest is None or watch.latest.number < sample.number:
            watch.latest = await _taken(dispatcher, sample, watch.latest)
        return watch.latest


async def _taken(
    dispatcher: Dispatcher, sample: Snapshot, before: PoolSnapshot | None
) -> PoolSnapshot:
    error = "timeout"
    try:
        async with asyncio.timeout(_PATIENCE):
            return await _take(dispatcher, sample)
    except TaskQueueError as failure:
        error = failure.code
    except TimeoutError:
        pass
    except Exception:  # noqa: BLE001 - whatever it is, the next moment may be read again
        _log.exception("could not read the slot pool for the dashboard")
        error = "internal"
    if before is None:
        return PoolSnapshot(
            number=sample.number, at=sample.at, view=PoolView(epoch=""), error=error
        )
    return msgspec.structs.replace(before, number=sample.number, at=sample.at, error=error)


async def _take(dispatcher: Dispatcher, sample: Snapshot) -> PoolSnapshot:
    view = await dispatcher.pool.inspect()
    by_model: dict[str, list[EndpointInfo]] = defaultdict(list)
    for info in view.endpoints:
        by_model[info.endpoint.model].append(info)
    for known in dispatcher.registry.known():
        by_model[known.model] += ()
    models = [
        ModelSnapshot(
            name=name,
            config=_config(dispatcher, name),
            endpoints=tuple(endpoints),
            reading=sample.readings.get(queue_of(name)),
        )
        for name, endpoints in sorted(by_model.items())
    ]
    statuses = await _statuses(dispatcher, _listed(view))
    return PoolSnapshot(
        number=sample.number, at=sample.at, view=view, known=tuple(models), statuses=statuses
    )


def _config(dispatcher: Dispatcher, model: str) -> ModelConfig:
    view = dispatcher.registry.view(model)
    return ModelConfig() if view is None else view.config


async def _statuses(dispatcher: Dispatcher, leases: list[SlotLease]) -> dict[str, TaskStatus]:
    ids: dict[str, list[str]] = defaultdict(list)
    for lease in leases:
        if lease.job is not None:
            ids[lease.model].append(lease.job)
    matches: dict[str, TaskStatus] = {}
    for model, jobs in ids.items():
        statuses = await dispatcher.control.statuses(queue_of(model), *jobs)
        matches.update({status.task_id: status for status in statuses if status is not None})
    return matches
