"""The event stream that updates a page: each event has the changes since the previous event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response

from taskqueue_core.concurrency import first_completed
from taskqueue_core.limits import check_name
from taskqueue_core.tasks import TaskStatus
from taskqueue_server.dashboard.pages import poller_of
from taskqueue_server.dashboard.poller import StatsPoller
from taskqueue_server.dashboard.snapshot import Snapshot
from taskqueue_server.dashboard.views import DashboardView, encoded
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.event_stream import EventStream
from taskqueue_server.routing.operations import RequestContext

_OF_ALL, _OF_ONE = {"overview", "workers"}, {"queue", "dead", "task"}
_PATIENCE = 5.0


async def live(call: RequestContext) -> Response:
    """Return the event stream of a page. Raises `ProblemError` if the page is unknown or the client may not see it."""
    query = call.request.query_params
    name, key, task_id = query.get("view", ""), query.get("key"), query.get("id")
    known = name in (_OF_ALL if key is None else _OF_ONE)
    if not known or (name == "task") != (task_id is not None):
        raise ProblemError(404, "not_found", "unknown view")
    if key is not None:
        check_name("key", key)
        call.demand(key)
    if task_id is not None:
        check_name("id", task_id)
    poller = poller_of(call)
    events = _events(call, poller, DashboardView(call, name, key, task_id))
    return EventStream(poller.stream(call.client_name), events)


async def moments(call: RequestContext) -> AsyncGenerator[Snapshot | str]:
    """Yield each new sample. Once the client's rights change or the server shuts down, yield the reason and end."""
    poller = poller_of(call)
    number = poller.newest
    with call.watch_access() as revoked:
        while True:
            event = await first_completed(revoked.wait(), poller.after(number))
            if not isinstance(event, Snapshot):
                yield "ending" if event is None else "signed-out"
                return
            number = event.number
            yield event


async def _events(
    call: RequestContext, poller: StatsPoller, view: DashboardView
) -> AsyncGenerator[bytes]:
    before: Snapshot | None = None
    values: dict[str, str] = {}
    async with aclosing(moments(call)) as samples:
        async for moment in samples:
            if isinstance(moment, str):
                yield encoded("bye", {"reason": moment})
                return
            snapshot = await view.showing(moment)
            status = await _status(call, view)
            async with poller.turn:
                event = await view.event(snapshot, before, values, status)
                values = view.texts(snapshot)
                await asyncio.sleep(0)  # let other pages render, and other asyncio tasks run
            before = snapshot
            yield event


async def _status(call: RequestContext, view: DashboardView) -> TaskStatus | None:
    if view.name != "task" or view.key is None or view.task_id is None:
        return None
    try:
        async with asyncio.timeout(_PATIENCE):
            (status,) = await call.context.control.statuses(view.key, view.task_id)
    except Exception:  # noqa: BLE001 - the sample already reports an unavailable store
        return None
    return status
