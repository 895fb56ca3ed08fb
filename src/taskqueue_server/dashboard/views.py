"""The part of a sample that one page shows to one client."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.responses import Response

from taskqueue_core.tasks import Ledger, TaskStatus, WorkerInfo
from taskqueue_server.auth.access import may_observe
from taskqueue_server.dashboard import formatting
from taskqueue_server.dashboard.history import LIVE, RANGES, HistoryRecorder
from taskqueue_server.dashboard.pages import flows_of, poller_of, render
from taskqueue_server.dashboard.queue_list import OverviewQuery
from taskqueue_server.dashboard.snapshot import HISTORY, LISTED, Snapshot
from taskqueue_server.routing.operations import RequestContext

_WITH_QUEUES = {"overview", "queue"}
_WITH_CHARTS = {"overview", "queue"}
_TENANTS = 5
"""number of samples after which the table of tenants is reloaded"""
_ROWS = 40
"""number of rows of the history that are computed before other tasks of the event loop get a turn"""
_encoder = msgspec.json.Encoder()


def sees_all(call: RequestContext) -> bool:
    """Return whether the client may see every queue, including future queues."""
    return call.identity is not None and may_observe(call.identity)


class DashboardView:
    """The content of one page for one client. Clients with the same `Identity` share the computed values."""

    def __init__(
        self, call: RequestContext, name: str, key: str | None = None, task_id: str | None = None
    ) -> None:
        self.name = name
        self.key = key
        self.task_id = task_id
        self._call = call
        self._poller = poller_of(call)
        self.chosen = OverviewQuery.of(call.request.query_params)
        self.range = RANGES[self.chosen.range]
        """the time range of the charts"""
        self._same = (call.identity, name, key, self.chosen)

    async def render(
        self,
        snapshot: Snapshot,
        status: int = 200,
        *,
        task: TaskStatus | None = None,
        **values: Any,
    ) -> Response:
        """Return the page, rendered from ``snapshot``; ``values`` are additional variables of the template."""
        names = {"view": self.name, "key": self.key, "id": self.task_id}
        query = urlencode({name: value for name, value in names.items() if value is not None})
        values = {
            **names,
            "range": self.range,
            "ranges": RANGES.values(),
            "prometheus": self._prometheus(),
            "live": f"/live?{query}&{self.chosen.query()}".rstrip("&"),
            "chosen": self.chosen,
            "snapshot": snapshot,
            "shape": self.shape(snapshot, task),
            "ledger": msgspec.structs.asdict(self.total(snapshot)),
            "texts": self.texts(snapshot),
            "workers": self.workers(snapshot),
            "task": task,
            "server": str(self._call.request.base_url).rstrip("/"),
            **values,
        }
        return await render(self._call, f"{self.name}.html", status, **values)

    def _prometheus(self) -> str | None:
        """Return the address of the flow of these queues in Prometheus, if the settings name one."""
        url = self._call.context.settings.prometheus
        if url is None:
            return None
        chosen = "" if self.key is None else f"{{key={json.dumps(self.key)}}}"
        expression = f"sum(rate(taskqueue_published_total{chosen}[5m]))"
        query = {"g0.expr": expression, "g0.tab": "0", "g0.range_input": "7d"}
        return f"{url.rstrip('/')}/graph?{urlencode(query)}"

    def keys(self, snapshot: Snapshot) -> list[str]:
        """Return the queues that the page shows."""
        if self.key is not None:
            visible = self.key in snapshot.readings and self._call.is_allowed(self.key)
            return [self.key] if visible else []
        made = (self._call.identity, "keys")
        return self._poller.once(snapshot, made, lambda: snapshot.keys(self._call.is_allowed))

    async def showing(self, snapshot: Snapshot) -> Snapshot:
        """Return a sample with the settings of the queues that the page shows."""
        if self.name not in _WITH_QUEUES:
            return snapshot
        return await self._poller.showing(snapshot, self.listed(snapshot))

    def listed(self, snapshot: Snapshot) -> Sequence[str]:
        """Return the queues that have a row on the page."""
        keys = self.keys(snapshot)
        if self.name != "overview":
            return keys[:LISTED]
        found = self.chosen.found
        made = (*self._same, "listed")
        return self._poller.once(snapshot, made, lambda: self.chosen.shown(found(snapshot, keys)))

    def total(self, snapshot: Snapshot) -> Ledger:
        """Return the sum of the ledgers of the queues that the page shows."""
        made = (*self._same, "total")
        return self._poller.once(snapshot, made, lambda: snapshot.total(self.keys(snapshot)))

    def workers(self, snapshot: Snapshot) -> list[WorkerInfo]:
        """Return the workers that subscribe only to queues that the client may see."""
        made = (*self._same, "workers")
        return self._poller.once(snapshot, made, lambda: snapshot.workers_of(self._call.is_allowed))

    def texts(self, snapshot: Snapshot) -> dict[str, str]:
        """Return all texts of the page by the name of the element that shows them."""
        return self._poller.once(snapshot, (*self._same, "texts"), lambda: self._texts(snapshot))

    def _texts(self, snapshot: Snapshot) -> dict[str, str]:
        window = self._poller.history.window(self._drawn(snapshot))
        texts = {
            **formatting.of_ledger(self.total(snapshot)),
            "rate.published": formatting.rate(window.published),
            "rate.done": formatting.rate(window.done),
            "store": _store(snapshot),
            "@store": "ok" if snapshot.error is None and snapshot.health.ok else "bad",
            "workers": formatting.count(len(self.workers(snapshot))),
        }
        for worker in self.workers(snapshot):
            texts[f"w.{worker.worker_id}.in_flight"] = formatting.count(worker.in_flight)
        for key in self.listed(snapshot) if self.name in _WITH_QUEUES else ():
            texts.update(self._poller.texts(snapshot, key))
        return texts

    def _drawn(self, snapshot: Snapshot) -> list[str] | None:
        return None if self.key is None and sees_all(self._call) else self.keys(snapshot)

    def shape(self, snapshot: Snapshot, status: TaskStatus | None = None) -> str:
        """Return a hash that changes when the elements of the page must change, not only their texts."""
        if self.name == "task":
            return _version_of([snapshot.error, status])
        return self._poller.once(snapshot, (*self._same, "shape"), lambda: self._shape(snapshot))

    def _shape(self, snapshot: Snapshot) -> str:
        # Sorted by name, because the order of the rows changes all the time if they are sorted by a number.
        readings = [(key, snapshot.readings[key]) for key in sorted(self.listed(snapshot))]
        if self.name == "dead":
            return _version_of([(key, reading.ledger.dead) for key, reading in readings])
        parts: list[Any] = [snapshot.error]
        if self.name == "workers":
            return _version_of(
                [*parts, [(w.worker_id, w.keys, w.connections) for w in self.workers(snapshot)]]
            )
        if self.key is not None and flows_of(self._call).of(self.key):
            parts.append(snapshot.number // _TENANTS)
        parts += [(key, reading.settings.version) for key, reading in readings]
        return _version_of([*parts, [worker.worker_id for worker in self.workers(snapshot)]])

    async def event(
        self,
        snapshot: Snapshot,
        before: Snapshot | None,
        values: dict[str, str],
        status: TaskStatus | None,
    ) -> bytes:
        """Return the event for a sample: the texts that differ from ``values``, and the new row of the charts.

        If ``before``, the previous sample that was sent, is ``None``, the event has all rows of the charts.
        """
        made = self._poller.made(snapshot)
        name = (*self._same, "event", before.number if before else None)
        if self.name == "task":
            return self._event(snapshot, values, status, [])
        if name not in made:
            rows: list[list[float | None]] = []
            if self.name in _WITH_CHARTS:
                for row in self._rows(snapshot, newest=before is not None):
                    rows.append(row)
                    if len(rows) % _ROWS == 0:
                        await asyncio.sleep(0)
            made[name] = self._event(snapshot, values, status, rows)
        result: bytes = made[name]
        return result

    def _rows(self, snapshot: Snapshot, *, newest: bool) -> Iterator[list[float | None]]:
        """Return the rows of the charts; with ``newest`` only the last row, and the gap before it."""
        drawn = self._drawn(snapshot)
        if self.range is LIVE:
            return self._poller.history.rows(drawn, 1 if newest else HISTORY)
        history: HistoryRecorder = self._call.request.app.state.history
        return history.rows(drawn, self.range, 2 if newest else None)

    def _event(
        self,
        snapshot: Snapshot,
        values: dict[str, str],
        status: TaskStatus | None,
        rows: list[list[float | None]],
    ) -> bytes:
        texts = self.texts(snapshot)
        return encoded(
            "sample",
            {
                "sample": snapshot.number,
                "at": snapshot.at,
                "ledger": msgspec.structs.asdict(self.total(snapshot)),
                "texts": {name: text for name, text in texts.items() if values.get(name) != text},
                "shape": self.shape(snapshot, status),
                "rows": rows,
            },
        )


def encoded(name: str, value: object) -> bytes:
    """Return a server-sent event with the name and the JSON of the value."""
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"


def _store(snapshot: Snapshot) -> str:
    if snapshot.error is not None:
        return f"does not respond ({snapshot.error})"
    return "responds" if snapshot.health.ok else "is not healthy"


def _version_of(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()[:12]
