"""Dead letters: read, put back, or given up for good."""

from __future__ import annotations

from urllib.parse import urlencode

from starlette.responses import Response

from taskqueue_core import dead_letter_filter
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.tasks import DeadLetter
from taskqueue_server.dashboard import formatting
from taskqueue_server.dashboard.pages import path, render, sampler_of, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.dashboard.views import View
from taskqueue_server.routing.operations import Call

__all__ = ["act", "letters"]

_PAGE = 50
_FILTER = 200
_ACTIONS = {"redrive", "redrive-all", "discard", "discard-all"}


class _Sought(dead_letter_filter.Sieve, frozen=True, kw_only=True):
    """What the search of the page lets through."""

    text: str

    @classmethod
    def by(cls, call: Call, text: str) -> _Sought:
        """Look for a text, in letters of any case."""
        made = call.hub.backend.now()
        return cls(reason=None, error=None, before=None, made=made, text=text.lower())

    @property
    def lets_all_through(self) -> bool:
        return not self.text

    def __contains__(self, letter: DeadLetter) -> bool:
        texts = [letter.reason, letter.task.id, letter.task.tenant or ""]
        texts += [failure.error for failure in letter.history]
        return any(self.text in text.lower() for text in texts)


async def letters(call: Call) -> Response:
    """Show a page of dead letters, the oldest first."""
    return await _page(call, call.name("key"))


async def act(call: Call) -> Response:
    """Redrive or discard one, some, or all that fit. To discard needs a word of confirmation."""
    key, form = call.name("key"), await read_form(call)
    wanted = form.text("filter")[:_FILTER]
    one, action = form.text("one"), form.text("action")
    if not one and action not in _ACTIONS:
        return see_other(call, path("queues", key, "dead"), "nothing")
    verb = "redrive" if one or action.startswith("redrive") else "discard"
    if verb == "discard" and form.text("confirm") != "discard":
        return await _page(
            call, key, 422, error="Nothing was discarded: tick the box to confirm it."
        )
    back = path("queues", key, "dead") + (f"?{urlencode({'filter': wanted})}" if wanted else "")
    following = None
    if one or not action.endswith("-all"):
        done = await _each(call, key, verb, [one] if one else form.all("ids"))
    elif wanted:
        done, following = await _sift(call, key, verb, wanted)
    else:
        done = await getattr(call.hub.dead_letters, verb)(key)
    if not done and not following:
        return see_other(call, back, "nothing")
    said = "more" if following else "redriven" if verb == "redrive" else "discarded"
    return see_other(call, back, said, done)


async def _sift(call: Call, key: str, verb: str, wanted: str) -> tuple[int, str | None]:
    letters = call.hub.dead_letters
    sought = _Sought.by(call, wanted)
    return await dead_letter_filter.act(letters, key, sought, getattr(letters, verb), after=None)


async def _each(call: Call, key: str, verb: str, ids: list[str]) -> int:
    for task_id in ids:
        check_name("ids", task_id)
    ids = list(dict.fromkeys(ids))
    move = getattr(call.hub.dead_letters, verb)
    done = 0
    for start in range(0, len(ids), LIMITS.batch):
        done += await move(key, *ids[start : start + LIMITS.batch])
    return done


async def _page(call: Call, key: str, status: int = 200, error: str | None = None) -> Response:
    wanted = call.request.query_params.get("filter", "").strip()[:_FILTER]
    after = call.word("after")
    found, following = await dead_letter_filter.page(
        call.hub.dead_letters, key, _Sought.by(call, wanted), limit=_PAGE, after=after
    )
    sampler = sampler_of(call)
    sample = await sampler.fresh()
    view = View(call, "dead", key)
    ledger = view.total(sample)
    on = {"filter": wanted, "after": following} if following else {}
    return await render(
        call,
        "dead.html",
        status,
        live=f"/live?view=dead&key={path(key)[1:]}",
        sample=sample,
        shape=view.shape(sample),
        key=key,
        letters=found,
        sought=wanted,
        after=after,
        following=urlencode({name: text for name, text in on.items() if text}),
        dead=ledger.dead,
        ledger=formatting.raw(ledger),
        texts=view.texts(sample),
        error=error,
    )
