"""What keeps a page up to date: a stream of events, each with what has changed since the one before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from taskqueue_core.limits import check_name
from taskqueue_core.tasks import TaskStatus
from taskqueue_server.dashboard.pages import sampler_of
from taskqueue_server.dashboard.sampler import Sampler
from taskqueue_server.dashboard.snapshot import Sample
from taskqueue_server.dashboard.views import View, encoded
from taskqueue_server.problems import ProblemError, respond
from taskqueue_server.routing.operations import Call

__all__ = ["EventStream", "live", "moments"]

_OF_ALL, _OF_ONE = {"overview", "workers"}, {"queue", "dead", "task"}
_PATIENCE = 5.0
_READS = 10.0
"""seconds for which one that does not read is waited for; its place is free then"""


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
    return EventStream(sampler, _events(call, sampler, View(call, name, key, task_id)), call.who)


class EventStream(StreamingResponse):
    """Has one of the places while it is sent; where there is none left it is a problem instead."""

    def __init__(
        self, sampler: Sampler, events: AsyncIterator[bytes], who: str | None = None
    ) -> None:
        headers = {"x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._sampler = sampler
        self._who = who

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, as any response of an ASGI application."""

        async def patient(message: Message) -> None:
            async with asyncio.timeout(_READS):
                await send(message)

        try:
            with self._sampler.stream(self._who), suppress(TimeoutError, ClientDisconnect):
                await super().__call__(scope, receive, patient)
        except ProblemError as error:
            await respond(error)(scope, receive, send)


async def moments(call: Call) -> AsyncGenerator[Sample | str]:
    """Yield each new sample, for as long as who asks has its rights; at last why there are no more."""
    sampler = sampler_of(call)
    number = sampler.newest
    with call.stay() as revoked:
        leaving = asyncio.create_task(revoked.wait())
        try:
            while True:
                waiting = asyncio.create_task(sampler.after(number))
                try:
                    await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
                    if leaving.done():
                        yield "signed-out"
                        return
                    sample = waiting.result()
                finally:
                    waiting.cancel()
                if sample is None:
                    yield "ending"
                    return
                number = sample.number
                yield sample
        finally:
            leaving.cancel()


async def _events(call: Call, sampler: Sampler, view: View) -> AsyncIterator[bytes]:
    before: Sample | None = None
    told: dict[str, str] = {}
    async with aclosing(moments(call)) as samples:
        async for sample in samples:
            if isinstance(sample, str):
                yield encoded("bye", {"reason": sample})
                return
            status = await _status(call, view)
            async with sampler.turn:
                event = await view.event(sample, before, told, status)
                told = view.texts(sample)
                await asyncio.sleep(0)  # who is next waits for the turn, and others come in
            before = sample
            yield event


async def _status(call: Call, view: View) -> TaskStatus | None:
    if view.name != "task" or view.key is None or view.task_id is None:
        return None
    try:
        async with asyncio.timeout(_PATIENCE):
            (found,) = await call.hub.control.statuses(view.key, view.task_id)
    except Exception:  # noqa: BLE001 - the sample tells that the store is away
        return None
    return found
