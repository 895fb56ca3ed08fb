"""One queue: what flows through it, and what an operator may change."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import (
    CapabilityMissing,
    ConfigurationError,
    InvalidInput,
    SettingsConflict,
)
from taskqueue_core.queue_settings import pause_queue
from taskqueue_core.tasks import Ledger, QueueStats
from taskqueue_server.dashboard import formatting, settings_form
from taskqueue_server.dashboard.pages import path, render, sampler_of, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.dashboard.snapshot import Look
from taskqueue_server.dashboard.views import View
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Call

__all__ = ["pause", "purge", "queue", "settings"]

_TENANTS = 50


async def queue(call: Call) -> Response:
    """Show a queue; an unknown one is empty."""
    return await _page(call, call.name("key"))


async def pause(call: Call) -> Response:
    """Pause or resume the hand-out, or the intake."""
    key, form = call.name("key"), await read_form(call)
    intake, paused = form.text("what") == "intake", form.text("to") == "paused"
    if form.text("to") not in {"paused", "resumed"}:
        raise InvalidInput("to", "another word", "paused or resumed")
    await pause_queue(call.hub.control, key, intake=intake, paused=paused)
    said = ("intake-" if intake else "") + ("paused" if paused else "resumed")
    back = path() if form.text("back") == "overview" else path("queues", key)
    return see_other(call, back, said)


async def settings(call: Call) -> Response:
    """Change limits and order. What does not go is said beside its field, and nothing is changed."""
    key, form = call.name("key"), await read_form(call)
    found = await call.hub.control.settings(key)
    filled = {name: form.text(name) for name in settings_form.NAMES}
    try:
        wanted = settings_form.changed(found, filled, form.text("version"))
        if wanted != found:
            await call.hub.control.configure(key, wanted)
    except settings_form.Wrong as wrong:
        return await _page(call, key, 422, filled=filled, errors=wrong.errors)
    except InvalidInput as error:
        errors = settings_form.beside(error)
        return await _page(call, key, 422, filled=filled, errors=errors)
    except (CapabilityMissing, ConfigurationError) as error:
        return await _page(call, key, 422, filled=filled, errors={"": str(error)})
    except SettingsConflict:
        found = await call.hub.control.settings(key)
        said = (
            "Somebody else has changed these settings in the meantime. Below is what you filled in; "
            "where it differs, what is in force now stands beside it. Save again to put yours in its place."
        )
        return await _page(call, key, 409, filled=filled, errors={"": said})
    return see_other(call, path("queues", key), "saved")


async def purge(call: Call) -> Response:
    """Cancel all that waits or is scheduled, when the queue's name was typed."""
    key, form = call.name("key"), await read_form(call)
    if form.text("confirm") != key:
        return await _page(
            call, key, 422, errors={"confirm": "Type the name of the queue, as above."}
        )
    number = await call.hub.control.purge(key)
    return see_other(call, path("queues", key), "purged", number)


async def _page(
    call: Call,
    key: str,
    status: int = 200,
    *,
    filled: dict[str, str] | None = None,
    errors: dict[str, str] | None = None,
) -> Response:
    sampler = sampler_of(call)
    sample = await sampler.fresh()
    known = key in sample.looks
    if sample.error is not None and not known:
        detail = f"the store does not answer ({sample.error})"
        raise ProblemError(503, "store", detail, headers={"retry-after": "1"})
    look = sample.looks.get(key) or _empty(key, await call.hub.control.settings(key))
    view = View(call, "queue", key)
    now = settings_form.fields(look.settings)
    return await render(
        call,
        "queue.html",
        status,
        live=f"/live?view=queue&key={path(key)[1:]}",
        sample=sample,
        shape=view.shape(sample),
        key=key,
        look=look,
        known=known,
        ledger=formatting.raw(look.ledger),
        texts={**view.texts(sample), **formatting.of_queue(key, look, sample, sampler.history)},
        limits=formatting.limits(look.settings),
        tenants=_tenants(call, key, look.settings),
        since=sampler.since,
        workers=[worker for worker in view.workers(sample) if key in worker.keys],
        groups=settings_form.GROUPS,
        now=now,
        filled=filled or now,
        errors=errors or {},
        server=str(call.request.base_url).rstrip("/"),
    )


def _empty(key: str, found: QueueSettings) -> Look:
    return Look(QueueStats(key=key, ledger=Ledger()), found)


def _tenants(call: Call, key: str, found: QueueSettings) -> list[dict[str, Any]]:
    sampler = sampler_of(call)
    flows = sampler.gauges.tenants(key)
    handed_out = sum(flow.delivered for flow in flows.values())
    most = sorted(flows.items(), key=lambda one: (-one[1].delivered, one[0]))
    return [
        {
            "name": tenant or "all others",
            "weight": found.weights.get(tenant, 1),
            "flow": flow,
            "share": flow.delivered / handed_out if handed_out else 0.0,
        }
        for tenant, flow in most[:_TENANTS]
    ]
