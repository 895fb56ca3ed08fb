"""The page of dead letters: list, redrive, discard."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlencode

from starlette.responses import Response

from taskqueue_core import dead_letter_filter
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_server.dashboard.dead_matches import (
    MAX_FILTER,
    TextFilter,
    matches_of,
    move_all,
    preview,
)
from taskqueue_server.dashboard.pages import path, poller_of, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.dashboard.views import DashboardView
from taskqueue_server.routing.operations import RequestContext

_PAGE = 50
_ACTIONS = {"redrive", "redrive-all", "discard", "discard-all"}


async def dead_letters(call: RequestContext) -> Response:
    """Show a page of dead letters, oldest first."""
    return await _page(call, call.name("key"))


async def act(call: RequestContext) -> Response:
    """Redrive one dead letter, or redrive or discard several: those selected, or all that match the filter.

    All are redriven after a preview.
    """
    key, form = call.name("key"), await read_form(call)
    search = form.text("filter").strip()[:MAX_FILTER]
    name, action = form.text("one"), form.text("action")
    if not name and action not in _ACTIONS:
        return see_other(path("queues", key, "dead"), "nothing")
    redrives = bool(name) or action.startswith("redrive")
    verb: Literal["redrive", "discard"] = "redrive" if redrives else "discard"
    if verb == "discard" and form.text("confirm") != "discard":
        return await _page(call, key, 422, error="Nothing was discarded: tick the box to confirm.")
    back = path("queues", key, "dead") + (f"?{urlencode({'filter': search})}" if search else "")
    if not name and action == "redrive-all" and form.text("confirm") != "redrive":
        snapshot = await poller_of(call).fresh(key)
        dead = snapshot.readings[key].ledger.dead if key in snapshot.readings else 0
        matches = await matches_of(call, key, dead, search)
        return await preview(call, key, search, [matches])
    more = False
    if name or not action.endswith("-all"):
        done = await _each(call, key, verb, [name] if name else form.all("ids"))
    else:
        done, more = await move_all(call, key, verb, search, form)
    chosen = f"id={name}" if name else f"filter={search}" if search else "all"
    details = chosen if name or action.endswith("-all") else " ".join(["ids:", *form.all("ids")])
    call.note(verb, key, tasks=done, details=details)
    if not done and not more:
        return see_other(back, "nothing")
    notice = "more" if more else "redriven" if verb == "redrive" else "discarded"
    return see_other(back, notice, done)


async def _each(call: RequestContext, key: str, verb: str, ids: list[str]) -> int:
    for task_id in ids:
        check_name("ids", task_id)
    ids = list(dict.fromkeys(ids))
    move = getattr(call.context.dead_letters, verb)
    done = 0
    for start in range(0, len(ids), LIMITS.batch):
        done += await move(key, *ids[start : start + LIMITS.batch])
    return done


async def _page(
    call: RequestContext, key: str, status: int = 200, error: str | None = None
) -> Response:
    search = call.request.query_params.get("filter", "").strip()[:MAX_FILTER]
    after = call.query_name("after")
    conditions = TextFilter.by(search, call.context.backend.now())
    matches, following = await dead_letter_filter.page(
        call.context.dead_letters, key, conditions, limit=_PAGE, after=after
    )
    snapshot = await poller_of(call).fresh(key)
    view = DashboardView(call, "dead", key)
    on = {"filter": search, "after": following} if following else {}
    return await view.render(
        snapshot,
        status,
        dead_letters=matches,
        search=search,
        after=after,
        following=urlencode({name: text for name, text in on.items() if text}),
        dead=view.total(snapshot).dead,
        error=error,
    )
