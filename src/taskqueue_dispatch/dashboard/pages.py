"""The dispatcher's dashboard page, the stream that updates it, and its actions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response

from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.dashboard.formatting import shape, texts
from taskqueue_dispatch.dashboard.snapshot import snapshot_of
from taskqueue_dispatch.handler_helpers import dispatcher_of
from taskqueue_dispatch.names import queue_of
from taskqueue_server.auth.access import OBSERVING
from taskqueue_server.dashboard.pages import poller_of, render, see_other
from taskqueue_server.dashboard.settings_form import Form, read_form
from taskqueue_server.dashboard.snapshot import Snapshot
from taskqueue_server.dashboard.stream import moments
from taskqueue_server.dashboard.views import encoded
from taskqueue_server.routing.event_stream import EventStream
from taskqueue_server.routing.extensions import NavLink
from taskqueue_server.routing.operations import Handler, Operation, RequestContext, Scope

PATH = "/dispatch"
_NOTICES = {
    "drained": "Draining. Running jobs continue; the server gets no new jobs.",
    "undrained": "In use again.",
    "removed": "Removed. The endpoint is deleted once none of its slots is held.",
    "unknown": "No change: the endpoint no longer exists.",
}
_ACTIONS = {"drain": "drained", "undrain": "undrained", "remove": "removed"}


async def show(call: RequestContext) -> Response:
    """Show models, endpoints and running jobs."""
    sample = await _showing(call, await poller_of(call).fresh())
    snapshot = (await snapshot_of(dispatcher_of(call), sample)).seen_by(call.is_allowed)
    return await render(
        call,
        "dispatch.html",
        200 if snapshot.error is None else 503,
        live=f"{PATH}/live",
        said=_NOTICES.get(call.request.query_params.get("said", "")),
        snapshot=sample,
        pool=snapshot,
        shape=shape(snapshot),
        texts=texts(snapshot, sample),
        queue_of=queue_of,
        server=str(call.request.base_url).rstrip("/"),
    )


async def act(call: RequestContext) -> Response:
    """Drain an endpoint, end draining, or remove the endpoint."""
    form = await read_form(call)
    action, model, server = form.text("action"), _exact(form, "model"), _exact(form, "server")
    if action not in _ACTIONS:
        raise InvalidInput("action", "an unknown value", "drain, undrain or remove")
    call.demand(queue_of(model))
    registry = dispatcher_of(call).registry
    if action == "remove":
        done = await registry.remove(model, server)
    else:
        done = await registry.drain(model, server, draining=action == "drain")
    call.note(f"{action} endpoint", queue_of(model), details=f"model={model} server={server}")
    return see_other(PATH, _ACTIONS[action] if done else "unknown")


async def _showing(call: RequestContext, sample: Snapshot) -> Snapshot:
    """Return a sample with the settings of the queues of all models."""
    models = dispatcher_of(call).registry.known()
    return await poller_of(call).showing(sample, [queue_of(view.model) for view in models])


def _exact(form: Form, name: str) -> str:
    """Return a form field with its leading and trailing spaces, which may be part of a model's name."""
    return next(iter(form.all(name)), "")


async def live(call: RequestContext) -> Response:
    """Return the event stream that updates the page, or a problem if there are too many streams."""
    return EventStream(poller_of(call).stream(call.client_name), _events(call))


async def _events(call: RequestContext) -> AsyncGenerator[bytes]:
    before: dict[str, str] = {}
    dispatcher = dispatcher_of(call)
    async with aclosing(moments(call)) as samples:
        async for moment in samples:
            if isinstance(moment, str):
                yield encoded("bye", {"reason": moment})
                return
            sample = await _showing(call, moment)
            snapshot = (await snapshot_of(dispatcher, sample)).seen_by(call.is_allowed)
            values = texts(snapshot, sample)
            changed = {name: text for name, text in values.items() if before.get(name) != text}
            before = values
            yield encoded(
                "sample",
                {
                    "sample": sample.number,
                    "at": sample.at,
                    "ledger": {},
                    "texts": changed,
                    "shape": shape(snapshot),
                    "rows": [],
                },
            )


def _operation(method: str, path: str, handler: Handler) -> Operation:
    return Operation(
        method=method,
        path=path,
        handler=handler,
        verb=OBSERVING if method == "GET" else "admin",
        scope=Scope.HANDLER,
        answers={200: None},
    )


PAGES = (
    _operation("GET", PATH, show),
    _operation("GET", f"{PATH}/live", live),
    _operation("POST", f"{PATH}/endpoints", act),
)
LINKS = (NavLink("Dispatch", PATH),)
TEMPLATES = "taskqueue_dispatch.dashboard"
