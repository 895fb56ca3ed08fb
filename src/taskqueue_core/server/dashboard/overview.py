"""The first page, and the workers."""

from __future__ import annotations

from starlette.responses import Response

from taskqueue_core.server.dashboard import figures
from taskqueue_core.server.dashboard.pages import render, sampler_of
from taskqueue_core.server.dashboard.samples import LISTED
from taskqueue_core.server.dashboard.stream import View, shape
from taskqueue_core.server.operations import Call

__all__ = ["overview", "workers"]


async def overview(call: Call) -> Response:
    """Show all queues, whether all tasks are accounted for, and who works."""
    sampler = sampler_of(call)
    sample = await sampler.fresh()
    view = View(sampler, "overview", call.may)
    keys = sample.keys(call.may)
    return render(
        call,
        "overview.html",
        200 if sample.error is None else 503,
        live="/live?view=overview",
        sample=sample,
        shape=shape(view, sample),
        looks={key: sample.looks[key] for key in keys[:LISTED]},
        hidden=max(0, len(keys) - LISTED),
        ledger=figures.raw(sample.total(keys)),
        texts=view.texts(sample),
        workers=sample.workers_of(call.may),
        everything=call.identity is not None and call.identity.may("admin"),
        server=str(call.request.base_url).rstrip("/"),
    )


async def workers(call: Call) -> Response:
    """Show who is subscribed, on any server of the store."""
    sampler = sampler_of(call)
    sample = await sampler.fresh()
    view = View(sampler, "workers", call.may)
    return render(
        call,
        "workers.html",
        live="/live?view=workers",
        sample=sample,
        shape=shape(view, sample),
        ledger=figures.raw(sample.total(sample.keys(call.may))),
        texts=view.texts(sample),
        workers=sample.workers_of(call.may),
        server=str(call.request.base_url).rstrip("/"),
    )
