"""The first page, and the workers."""

from __future__ import annotations

from starlette.responses import Response

from taskqueue_server.dashboard import formatting as figures
from taskqueue_server.dashboard.pages import render, sampler_of
from taskqueue_server.dashboard.snapshot import LISTED
from taskqueue_server.dashboard.views import View, sees_all
from taskqueue_server.routing.operations import Call

__all__ = ["overview", "workers"]


async def overview(call: Call) -> Response:
    """Show all queues, whether all tasks are accounted for, and who works."""
    sampler = sampler_of(call)
    sample = await sampler.fresh()
    view = View(call, "overview")
    keys = view.keys(sample)
    return await render(
        call,
        "overview.html",
        200 if sample.error is None else 503,
        live="/live?view=overview",
        sample=sample,
        shape=view.shape(sample),
        looks={key: sample.looks[key] for key in keys[:LISTED]},
        hidden=max(0, len(keys) - LISTED),
        ledger=figures.raw(view.total(sample)),
        texts=view.texts(sample),
        workers=view.workers(sample),
        everything=sees_all(call),
        server=str(call.request.base_url).rstrip("/"),
    )


async def workers(call: Call) -> Response:
    """Show who is subscribed, on any server of the store."""
    sampler = sampler_of(call)
    sample = await sampler.fresh()
    view = View(call, "workers")
    return await render(
        call,
        "workers.html",
        live="/live?view=workers",
        sample=sample,
        shape=view.shape(sample),
        ledger=figures.raw(view.total(sample)),
        texts=view.texts(sample),
        workers=view.workers(sample),
        server=str(call.request.base_url).rstrip("/"),
    )
