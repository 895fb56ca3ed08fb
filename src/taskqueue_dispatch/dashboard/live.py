"""What keeps the page up to date: the dashboard's stream of events, with the texts of this page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.responses import Response

from taskqueue_dispatch.dashboard.formatting import shape, texts
from taskqueue_dispatch.dashboard.pages import dispatcher_of
from taskqueue_dispatch.dashboard.snapshot import moment_of
from taskqueue_server.dashboard.pages import sampler_of
from taskqueue_server.dashboard.stream import EventStream, moments
from taskqueue_server.dashboard.views import encoded
from taskqueue_server.routing.operations import Call

__all__ = ["live"]


async def live(call: Call) -> Response:
    """Return the stream of the page. Raises `ProblemError` when there are too many."""
    return EventStream(sampler_of(call), _events(call), call.who)


async def _events(call: Call) -> AsyncIterator[bytes]:
    told: dict[str, str] = {}
    dispatcher = dispatcher_of(call)
    async with aclosing(moments(call)) as samples:
        async for sample in samples:
            if isinstance(sample, str):
                yield encoded("bye", {"reason": sample})
                return
            moment = (await moment_of(dispatcher, sample)).seen_by(call.may)
            now = texts(moment, sample)
            changed = {name: text for name, text in now.items() if told.get(name) != text}
            told = now
            yield encoded(
                "sample",
                {
                    "sample": sample.number,
                    "at": sample.at,
                    "ledger": {},
                    "texts": changed,
                    "shape": shape(moment),
                    "rows": [],
                },
            )
