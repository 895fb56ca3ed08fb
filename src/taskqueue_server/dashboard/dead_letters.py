"""The page of dead letters: list, redrive, discard."""

from __future__ import annotations

from urllib.parse import urlencode

from starlette.responses import Response

from taskqueue_core import dead_letter_filter
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.tasks import DeadLetter
from taskqueue_server.dashboard.pages import path, poller_of, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.dashboard.views import DashboardView
from taskqueue_server.routing.operations import RequestContext

_PAGE = 50
_FILTER = 200
_ACTIONS = {"redrive", "redrive-all", "discard", "discard-all"}


class _TextFilter(dead_letter_filter.DeadLetterFilter, frozen=True, kw_only=True):
    """A filter for dead letters whose reason, errors, id or tenant contain a text."""

    text: str

    @classmethod
    def by(cls, call: RequestContext, text: str) -> _TextFilter:
        """Return a filter that searches for ``text`` and ignores case."""
        made = call.context.backend.now()
        return cls(reason=None, error=None, before=None, made=made, text=text.lower())

    @property
    def lets_all_through(self) -> bool:
        return not self.text

    def __contains__(self, dead_letter: DeadLetter) -> bool:
        texts = [dead_letter.reason, dead_letter.task.id, dead_letter.task.tenant or ""]
        texts += [failure.error for failure in dead_letter.history]
        return any(self.text in text.lower() for text in texts)


async def dead_letters(call: RequestContext) -> Response:
    """Show a page of dead letters, oldest first."""
    return await _page(call, call.name("key"))


async def act(call: RequestContext) -> Response:
    """Redrive one dead letter, or redrive or discard several: those selected, or all that match the filter."""
    key, form = call.name("key"), await read_form(call)
    search = form.text("filter")[:_FILTER]
    name, action = form.text("one"), form.text("action")
    if not name and action not in _ACTIONS:
        return see_other(path("queues", key, "dead"), "nothing")
    verb = "redrive" if name or action.startswith("redrive") else "discard"
    if verb == "discard" and form.text("confirm") != "discard":
        return await _page(call, key, 422, error="Nothing was discarded: tick the box to confirm.")
    back = path("queues", key, "dead") + (f"?{urlencode({'filter': search})}" if search else "")
    following = None
    if name or not action.endswith("-all"):
        done = await _each(call, key, verb, [name] if name else form.all("ids"))
    elif search:
        dead_letters, conditions = call.context.dead_letters, _TextFilter.by(call, search)
        done, following = await dead_letter_filter.act(
            dead_letters, key, conditions, getattr(dead_letters, verb), after=None
        )
    else:
        done = await getattr(call.context.dead_letters, verb)(key)
    chosen = f"id={name}" if name else f"filter={search}" if search else "all"
    details = chosen if name or action.endswith("-all") else " ".join(["ids:", *form.all("ids")])
    call.note(verb, key, tasks=done, details=details)
    if not done and not following:
        return see_other(back, "nothing")
    notice = "more" if following else "redriven" if verb == "redrive" else "discarded"
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
    search = call.request.query_params.get("filter", "").strip()[:_FILTER]
    after = call.query_name("after")
    matches, following = await dead_letter_filter.page(
        call.context.dead_letters, key, _TextFilter.by(call, search), limit=_PAGE, after=after
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
