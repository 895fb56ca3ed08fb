"""What one page shows of a sample, to one who may see some of it."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec

from taskqueue_core.tasks import Ledger, TaskStatus, WorkerInfo
from taskqueue_server.dashboard import formatting
from taskqueue_server.dashboard.pages import sampler_of
from taskqueue_server.dashboard.snapshot import HISTORY, LISTED, Sample
from taskqueue_server.routing.operations import Call

__all__ = ["View", "encoded", "sees_all"]

_WITH_QUEUES = {"overview", "queue"}
_WITH_CHARTS = {"overview", "queue"}
_TENANTS = 5
"""samples after which a table of tenants is loaded anew"""
_ROWS = 40
"""rows of a history that are made at one go"""
_encoder = msgspec.json.Encoder()


def sees_all(call: Call) -> bool:
    """Whether somebody may see every queue, those to come as well."""
    return call.identity is not None and call.identity.may("admin")


class View:
    """One page. What is the same for all who may see the same is made once for all of them."""

    def __init__(
        self, call: Call, name: str, key: str | None = None, task_id: str | None = None
    ) -> None:
        self.name = name
        self.key = key
        self.task_id = task_id
        self._call = call
        self._sampler = sampler_of(call)
        self._same = (call.identity, name, key)

    @property
    def has_tenants(self) -> bool:
        """Whether tasks with a tenant went through this server."""
        return self.key is not None and bool(self._sampler.gauges.tenants(self.key))

    def keys(self, sample: Sample) -> list[str]:
        """Return the queues whose figures the page shows."""
        if self.key is not None:
            return [self.key] if self.key in sample.looks and self._call.may(self.key) else []
        return sample.keys(self._call.may)

    def total(self, sample: Sample) -> Ledger:
        """Return the sum of their ledgers."""
        made = (*self._same, "total")
        return self._sampler.once(sample, made, lambda: sample.total(self.keys(sample)))

    def workers(self, sample: Sample) -> list[WorkerInfo]:
        """Return the workers all of whose queues may be seen."""
        made = (*self._same, "workers")
        return self._sampler.once(sample, made, lambda: sample.workers_of(self._call.may))

    def texts(self, sample: Sample) -> dict[str, str]:
        """Return all texts of the page by their names."""
        return self._sampler.once(sample, (*self._same, "texts"), lambda: self._texts(sample))

    def _texts(self, sample: Sample) -> dict[str, str]:
        window = self._sampler.history.window(self._drawn(sample))
        texts = {
            **formatting.of_ledger(self.total(sample)),
            "rate.published": formatting.rate(window.published),
            "rate.done": formatting.rate(window.done),
            "store": _store(sample),
            "@store": "ok" if sample.error is None and sample.health.ok else "bad",
            "workers": formatting.count(len(self.workers(sample))),
        }
        for worker in self.workers(sample):
            texts[f"w.{worker.worker_id}.in_flight"] = formatting.count(worker.in_flight)
        for key in self.keys(sample)[:LISTED] if self.name in _WITH_QUEUES else ():
            texts.update(self._sampler.texts(sample, key))
        return texts

    def _drawn(self, sample: Sample) -> list[str] | None:
        return None if self.key is None and sees_all(self._call) else self.keys(sample)

    def shape(self, sample: Sample, status: TaskStatus | None = None) -> str:
        """Return a word that changes when the page has other parts than before, not only other figures."""
        if self.name == "task":
            return _word([sample.error, status])
        return self._sampler.once(sample, (*self._same, "shape"), lambda: self._shape(sample))

    def _shape(self, sample: Sample) -> str:
        looks = [(key, sample.looks[key]) for key in self.keys(sample)[:LISTED]]
        if self.name == "dead":
            return _word([(key, look.ledger.dead) for key, look in looks])
        parts: list[Any] = [sample.error]
        if self.name == "workers":
            return _word(
                [*parts, [(w.worker_id, w.keys, w.connections) for w in self.workers(sample)]]
            )
        if self.has_tenants:
            parts.append(sample.number // _TENANTS)
        parts += [(key, look.settings.version) for key, look in looks]
        return _word([*parts, [worker.worker_id for worker in self.workers(sample)]])

    async def event(
        self, sample: Sample, before: Sample | None, told: dict[str, str], status: TaskStatus | None
    ) -> bytes:
        """Return what is told after the sample ``before``, whose texts were ``told``: all, if there was none."""
        made = self._sampler.made(sample)
        name = (*self._same, "event", before.number if before else None)
        if self.name == "task":
            return self._event(sample, told, status, [])
        if name not in made:
            rows: list[list[float | None]] = []
            if self.name in _WITH_CHARTS:
                drawn = self._drawn(sample)
                for row in self._sampler.history.rows(drawn, 1 if before else HISTORY):
                    rows.append(row)
                    if len(rows) % _ROWS == 0:
                        await asyncio.sleep(0)
            made[name] = self._event(sample, told, status, rows)
        found: bytes = made[name]
        return found

    def _event(
        self,
        sample: Sample,
        told: dict[str, str],
        status: TaskStatus | None,
        rows: list[list[float | None]],
    ) -> bytes:
        texts = self.texts(sample)
        return encoded(
            "sample",
            {
                "sample": sample.number,
                "at": sample.at,
                "ledger": formatting.raw(self.total(sample)),
                "texts": {name: text for name, text in texts.items() if told.get(name) != text},
                "shape": self.shape(sample, status),
                "rows": rows,
            },
        )


def encoded(name: str, value: object) -> bytes:
    """Return an event of a stream."""
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"


def _store(sample: Sample) -> str:
    if sample.error is not None:
        return f"does not answer ({sample.error})"
    return "answers" if sample.health.ok else "is not well"


def _word(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()[:12]
