"""Metrics of one server for Prometheus: those of the process and those of the store."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, values
from prometheus_client.core import InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from taskqueue_core.concurrency import wait_forever
from taskqueue_core.hooks import Identity
from taskqueue_server.auth.access import may_observe
from taskqueue_server.context.server import VERSION, ServerContext
from taskqueue_server.metrics.process_metrics import ProcessMetrics
from taskqueue_server.metrics.store_metrics import (
    StoreMetrics,
    StoreStatistics,
    VisibleStatistics,
    families,
)
from taskqueue_server.prefect.handshake import PrefectConnection
from taskqueue_server.worker_socket.admission import SocketAdmission

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""environment variable with the folder in which server processes share their metrics; the supervisor sets it"""
_SHARE_SECONDS = 1.0
_OPEN = "application/openmetrics-text"
_CREATED_SUFFIX = "_created"


class Metrics:
    """Metrics of one server. If several processes share a port, each of them exports the sums of all processes."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._registry = CollectorRegistry()
        self.local = ProcessMetrics(self._registry, context.backend.now)
        self._store = StoreMetrics(context.control, context.backend.now)
        # The Prometheus library selects its mode, single process or multiprocess, when it is imported.
        is_multiprocess = getattr(values.ValueClass, "_multiprocess", False)
        self._folder = (os.environ.get(FOLDER) or None) if is_multiprocess else None
        if self._folder is None:
            ProcessCollector(registry=self._registry)
        context.hooks.register(self.local)

    async def share(self) -> None:
        """Write this process's metrics to the shared folder, if any, until cancelled; then stop counting."""
        try:
            while self._folder is not None:
                self._refresh()
                await asyncio.sleep(_SHARE_SECONDS)
            await wait_forever()
        finally:
            self._context.hooks.unregister(self.local)
            await self._store.close()

    async def render(self, identity: Identity, accept: str) -> tuple[bytes, str]:
        """Return the metrics that the identity may see, and their content type.

        The metrics of server processes are returned only if the identity may see all queues.
        """
        sees_all = may_observe(identity)
        self._refresh()
        statistics = await self._store.latest()
        shown = None
        if statistics is not None:
            # With many queues, filtering and encoding take long: use a thread, to keep the event loop responsive.
            may = partial(may_observe, identity)
            shown = await asyncio.to_thread(VisibleStatistics.of, statistics, may)
            await self._store.complete(statistics, shown.keys)
        encode, media_type = choose_encoder(_normalized_accept(accept))
        scrape = _Scrape(statistics, shown, self._sources() if sees_all else [])
        return await asyncio.to_thread(encode, scrape), media_type

    def _refresh(self) -> None:
        registry, local = self._context.registry, self.local
        members = [
            member for member in registry if isinstance(member, SocketAdmission | PrefectConnection)
        ]
        local.connections.labels("greeting").set(registry.strangers)
        local.connections.labels("welcome").set(len(registry) - registry.strangers)
        local.credit.set(sum(member.credit for member in members))
        local.held.set(sum(member.busy for member in members))
        local.long_polls.set(len(self._context.waiters))
        local.flush()

    def _sources(self) -> list[CollectorRegistry | MultiProcessCollector]:
        if self._folder is None:
            return [self._registry]
        _drop_ended_processes(Path(self._folder))
        return [MultiProcessCollector(None, self._folder)]  # type: ignore[no-untyped-call]


class _Scrape(NamedTuple):
    """Collector of the metrics that one scrape exports."""

    statistics: StoreStatistics | None
    shown: VisibleStatistics | None
    sources: list[CollectorRegistry | MultiProcessCollector]

    def collect(self) -> Iterator[Metric]:
        yield from families(self.statistics, self.shown)
        if self.sources:
            yield InfoMetricFamily(
                "taskqueue_build", "Version of the server.", {"version": VERSION}
            )
        for source in self.sources:
            for metric in source.collect():
                metric.samples = [s for s in metric.samples if not s.name.endswith(_CREATED_SUFFIX)]
                yield metric


def _normalized_accept(accept: str) -> str:
    """Return a simple Accept header that selects the same format as ``accept``.

    The Prometheus library fails on some valid headers.
    """
    kinds = {name.partition(";")[0].strip().lower() for name in accept.split(",")}
    return f"{_OPEN}; version=1.0.0" if _OPEN in kinds else ""


def _drop_ended_processes(folder: Path) -> None:
    """Delete from the folder the gauges of processes that have ended; keep their counters."""
    for file in folder.glob("gauge_live*_*.db"):
        number = file.stem.rpartition("_")[2]
        if number.isdigit() and not process_exists(int(number)):
            with contextlib.suppress(FileNotFoundError):  # another process may delete the file
                mark_process_dead(int(number), str(folder))  # type: ignore[no-untyped-call]


def process_exists(number: int) -> bool:
    """Return whether there is a process with this id."""
    try:
        os.kill(number, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True
