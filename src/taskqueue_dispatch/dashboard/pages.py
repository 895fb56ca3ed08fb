"""The page, and what an operator may do there."""

from __future__ import annotations

from typing import cast

from starlette.responses import Response

from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.dashboard.formatting import shape, texts
from taskqueue_dispatch.dashboard.snapshot import moment_of
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.service import Dispatcher
from taskqueue_server.dashboard.forms import Form, read_form
from taskqueue_server.dashboard.pages import render, sampler_of, see_other
from taskqueue_server.routing.operations import Call

__all__ = ["PATH", "act", "dispatcher_of", "show"]

PATH = "/dispatch"
_SAID = {
    "drained": "Draining. What runs there goes on; it gets no more jobs.",
    "undrained": "In use again.",
    "removed": "Removed. It is forgotten once nothing of it is held.",
    "unknown": "Nothing was done: there is no such endpoint any more.",
}
_ACTIONS = {"drain": "drained", "undrain": "undrained", "remove": "removed"}


def dispatcher_of(call: Call) -> Dispatcher:
    """Return the dispatcher of this server."""
    return cast("Dispatcher", call.hub.brought["dispatch"])


async def show(call: Call) -> Response:
    """Show models, endpoints and what runs."""
    sample = await sampler_of(call).fresh()
    moment = (await moment_of(dispatcher_of(call), sample)).seen_by(call.may)
    return await render(
        call,
        "dispatch.html",
        200 if moment.error is None else 503,
        live=f"{PATH}/live",
        said=_SAID.get(call.request.query_params.get("said", "")),
        sample=sample,
        moment=moment,
        shape=shape(moment),
        texts=texts(moment, sample),
        queue_of=queue_of,
        server=str(call.request.base_url).rstrip("/"),
    )


async def act(call: Call) -> Response:
    """Drain an endpoint, use it again, or remove it."""
    form = await read_form(call)
    action, model, server = form.text("action"), _exact(form, "model"), _exact(form, "server")
    if action not in _ACTIONS:
        raise InvalidInput("action", "another word", "drain, undrain or remove")
    call.demand(queue_of(model))
    registry = dispatcher_of(call).registry
    if action == "remove":
        done = await registry.remove(model, server)
    else:
        done = await registry.drain(model, server, draining=action == "drain")
    return see_other(call, PATH, _ACTIONS[action] if done else "unknown")


def _exact(form: Form, name: str) -> str:
    """Return a field as it was sent: blanks around a model's name are part of it."""
    return next(iter(form.all(name)), "")
