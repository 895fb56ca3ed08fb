"""The state of the slot pool at one time, read once for all clients of the dashboard."""

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
from taskqueue_dispatch.registry import ModelView
from taskqueue_dispatch.service import Dispatcher
from taskqueue_server.dashboard.snapshot import Snapshot, StoreReading

JOBS = 50
"""maximum number of running jobs that are listed, newest first"""
MODELS = 200
ENDPOINTS = 500
_TIMEOUT = 5.0
_log = logging.getLogger("taskqueue.dispatch")


class ModelSnapshot(ModelView, frozen=True, kw_only=True):
    """One model: its configuration, its endpoints and its queue."""

    reading: StoreReading | None
    """data of the model's queue; ``None`` before the first job of the queue"""

    @property
    def free(self) -> int:
        """Number of free slots of the model's usable endpoints."""
        return sum(endpoint.free for endpoint in self.endpoints if endpoint.usable)


class PoolSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The data that the dashboard page of the dispatcher shows."""

    number: int
    at: float
    view: PoolView
    known: tuple[ModelSnapshot, ...] = ()
    """all models, sorted by name"""
    statuses: dict[str, TaskStatus] = {}
    """task status of each listed job, by job id"""
    error: str | None = None
    """error code if the pool could not be read; models, endpoints and jobs are then those of the previous snapshot"""

    def seen_by(self, is_allowed: Callable[[str], bool]) -> PoolSnapshot:
        """Return the part of the snapshot that a client may see. ``is_allowed`` checks the name of a queue."""
        names = {model.model for model in self.known if is_allowed(model.key)}
        view = msgspec.structs.replace(
            self.view,
            endpoints=tuple(e for e in self.view.endpoints if e.endpoint.model in names),
            leases=tuple(lease for lease in self.view.leases if lease.model in names),
        )
        known = tuple(model for model in self.known if model.model in names)
        return msgspec.structs.replace(self, view=view, known=known)

    @property
    def models(self) -> tuple[ModelSnapshot, ...]:
        """The models that the page lists."""
        return self.known[:MODELS]

    @property
    def endpoints(self) -> tuple[EndpointInfo, ...]:
        """The endpoints that the page lists."""
        return self.view.endpoints[:ENDPOINTS]

    @property
    def jobs(self) -> list[SlotLease]:
        """The leases of the running jobs that the page lists, newest first."""
        return _listed(self.view)


def _listed(view: PoolView) -> list[SlotLease]:
    bound = [lease for lease in view.leases if lease.job is not None]
    return sorted(bound, key=attrgetter("fence"), reverse=True)[:JOBS]


class _Latest:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.snapshot: PoolSnapshot | None = None


_latest: WeakKeyDictionary[Dispatcher, _Latest] = WeakKeyDictionary()


async def snapshot_of(dispatcher: Dispatcher, sample: Snapshot) -> PoolSnapshot:
    """Return the snapshot for a sample of the store, or a newer one. Each snapshot is taken once, for all clients."""
    latest = _latest.setdefault(dispatcher, _Latest())
    async with latest.lock:
        if latest.snapshot is None or latest.snapshot.number < sample.number:
            latest.snapshot = await _take_or_keep(dispatcher, sample, latest.snapshot)
        return latest.snapshot


async def _take_or_keep(
    dispatcher: Dispatcher, sample: Snapshot, before: PoolSnapshot | None
) -> PoolSnapshot:
    error = "timeout"
    try:
        async with asyncio.timeout(_TIMEOUT):
            return await _take(dispatcher, sample)
    except TaskQueueError as failure:
        error = failure.code
    except TimeoutError:
        pass
    except Exception:  # noqa: BLE001 - the next sample may succeed
        _log.exception("could not read the slot pool for the dashboard")
        error = "internal"
    retained = before or PoolSnapshot(number=0, at=0.0, view=PoolView(epoch="", secret=""))
    return msgspec.structs.replace(retained, number=sample.number, at=sample.at, error=error)


async def _take(dispatcher: Dispatcher, sample: Snapshot) -> PoolSnapshot:
    view = await dispatcher.pool.inspect()
    by_model: dict[str, list[EndpointInfo]] = defaultdict(list)
    for info in view.endpoints:
        by_model[info.endpoint.model].append(info)
    views = {view.model: view for view in dispatcher.registry.known()}
    models = [
        ModelSnapshot(
            model=name,
            key=queue_of(name),
            config=views[name].config if name in views else ModelConfig(),
            endpoints=tuple(by_model[name]),
            reading=sample.readings.get(queue_of(name)),
        )
        for name in sorted({*by_model, *views})
    ]
    statuses = await _statuses(dispatcher, _listed(view))
    return PoolSnapshot(
        number=sample.number, at=sample.at, view=view, known=tuple(models), statuses=statuses
    )


async def _statuses(dispatcher: Dispatcher, leases: list[SlotLease]) -> dict[str, TaskStatus]:
    ids: dict[str, list[str]] = defaultdict(list)
    for lease in leases:
        if lease.job is not None:
            ids[lease.model].append(lease.job)
    by_id: dict[str, TaskStatus] = {}
    for model, jobs in ids.items():
        statuses = await dispatcher.control.statuses(queue_of(model), *jobs)
        by_id.update({status.task_id: status for status in statuses if status is not None})
    return by_id
