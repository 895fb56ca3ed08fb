"""What keeps a page up to date: a stream of events, each with what has changed since the one before."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from taskqueue_core.limits import check_name
from taskqueue_core.server.credentials import peer_of, token_of
from taskqueue_core.server.dashboard import figures
from taskqueue_core.server.dashboard.pages import sampler_of
from taskqueue_core.server.dashboard.sampler import Sampler
from taskqueue_core.server.dashboard.samples import LISTED, Sample
from taskqueue_core.server.operations import Call
from taskqueue_core.server.problems import ProblemError, respond
from taskqueue_core.tasks import TaskStatus

__all__ = ["View", "live", "shape"]

_OF_ALL, _OF_ONE = {"overview", "workers"}, {"queue", "dead", "task"}
_TENANTS = 5
"""samples after which a table of tenants is loaded anew"""
_IDENTIFY = 3.0
"""seconds after which the token is looked at again: a page whose token was revoked is told no more"""
_PATIENCE = 5.0
_encoder = msgspec.json.Encoder()


class View:
    """What one page shows of a sample, to one who may see some of it."""

    def __init__(
        self,
        sampler: Sampler,
        name: str,
        may: Callable[[str], bool],
        key: str | None = None,
        task_id: str | None = None,
    ) -> None:
        self._sampler = sampler
        self.name = name
        self.may = may
        self.key = key
        self.task_id = task_id

    @property
    def has_tenants(self) -> bool:
        """Whether tasks with a tenant went through this server."""
        return self.key is not None and bool(self._sampler.gauges.tenants(self.key))

    def keys(self, sample: Sample) -> list[str]:
        """Return the queues whose figures the page shows."""
        if self.key is not None:
            return [self.key] if self.key in sample.looks and self.may(self.key) else []
        return sample.keys(self.may)

    def texts(self, sample: Sample) -> dict[str, str]:
        """Return all texts of the page by their names."""
        keys, history = self.keys(sample), self._sampler.history
        window = history.window(keys)
        texts = {
            **figures.of_ledger(sample.total(keys)),
            "rate.published": figures.rate(window.published),
            "rate.done": figures.rate(window.done),
            "store": store_words(sample),
            "@store": "ok" if sample.error is None and sample.health.ok else "bad",
            "workers": figures.count(len(sample.workers_of(self.may))),
        }
        for worker in sample.workers_of(self.may):
            texts[f"w.{worker.worker_id}.in_flight"] = figures.count(worker.in_flight)
        for key in keys[:LISTED]:
            texts.update(self._sampler.texts(sample, key))
        return texts

    def event(self, sample: Sample, status: TaskStatus | None) -> dict[str, Any]:
        """Return what an event tells, all texts in it."""
        keys = self.keys(sample)
        return {
            "sample": sample.number,
            "at": sample.at,
            "ledger": figures.raw(sample.total(keys)),
            "texts": self.texts(sample),
            "shape": shape(self, sample, status),
        }


def store_words(sample: Sample) -> str:
    """Say how the store is."""
    if sample.error is not None:
        return f"does not answer ({sample.error})"
    return "answers" if sample.health.ok else "is not well"


def shape(view: View, sample: Sample, status: TaskStatus | None = None) -> str:
    """Return a word that changes when a page has other parts than before, not only other figures."""
    parts: list[Any] = [sample.error]
    if view.name == "task":
        parts += [status]
    elif view.name == "workers":
        parts += [(w.worker_id, w.keys, w.connections) for w in sample.workers_of(view.may)]
    else:
        if view.name == "queue" and view.has_tenants:
            parts.append(sample.number // _TENANTS)
        looks = [(key, sample.looks[key]) for key in view.keys(sample)[:LISTED]]
        parts += [(key, look.settings.version, bool(look.ledger.dead)) for key, look in looks]
        parts += [worker.worker_id for worker in sample.workers_of(view.may)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


async def live(call: Call) -> Response:
    """Return the stream of a page. Raises `ProblemError` when there are too many."""
    query = call.request.query_params
    name, key, task_id = query.get("view", ""), query.get("key"), query.get("id")
    known = name in (_OF_ALL if key is None else _OF_ONE)
    if not known or (name == "task") != (task_id is not None):
        raise ProblemError(404, "not_found", "there is no such view")
    if key is not None:
        check_name("key", key)
        call.demand(key)
    if task_id is not None:
        check_name("id", task_id)
    sampler = sampler_of(call)
    view = View(sampler, name, call.may, key, task_id)
    return _Stream(sampler, _events(call, sampler, view))


class _Stream(StreamingResponse):
    """Has one of the places while it is sent; where there is none left it is a problem instead."""

    def __init__(self, sampler: Sampler, events: AsyncIterator[bytes]) -> None:
        headers = {"x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._sampler = sampler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._sampler.stream():
                await super().__call__(scope, receive, send)
        except ProblemError as error:
            await respond(error)(scope, receive, send)


async def _events(call: Call, sampler: Sampler, view: View) -> AsyncIterator[bytes]:
    number, told, identified = -1, dict[str, str](), time.monotonic()
    while True:
        sample = await sampler.after(number)
        if sample is None:
            yield _event("bye", {"reason": "ending"})
            return
        if time.monotonic() - identified >= _IDENTIFY:
            identified = time.monotonic()
            if not _known(call, view):
                yield _event("bye", {"reason": "signed-out"})
                return
        keys = view.keys(sample)[:LISTED]
        event = view.event(sample, await _status(call, view))
        texts = event["texts"]
        event["texts"] = {name: text for name, text in texts.items() if told.get(name) != text}
        event["rows"] = sampler.history.rows(keys, 300 if number < 0 else 1)
        number, told = sample.number, texts
        yield _event("sample", event)


def _known(call: Call, view: View) -> bool:
    request = call.request
    identity = call.hub.identify(token_of(request), peer_of(request))
    if identity is None or "admin" not in identity.verbs:
        return False
    call.identity = identity
    return view.key is None or identity.may("admin", view.key)


async def _status(call: Call, view: View) -> TaskStatus | None:
    if view.name != "task" or view.key is None or view.task_id is None:
        return None
    try:
        async with asyncio.timeout(_PATIENCE):
            (found,) = await call.hub.control.statuses(view.key, view.task_id)
    except Exception:  # noqa: BLE001 - the sample tells that the store is away
        return None
    return found


def _event(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(value) + b"\n\n"
