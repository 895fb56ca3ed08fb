"""Dead letters: read, put back, or given up for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlencode

from starlette.responses import Response

from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.server.api.operations import Call
from taskqueue_core.server.dashboard import figures
from taskqueue_core.server.dashboard.forms import Form, read_form
from taskqueue_core.server.dashboard.pages import path, render, sampler_of, see_other
from taskqueue_core.server.dashboard.views import View
from taskqueue_core.tasks import DeadLetter

__all__ = ["act", "letters"]

_PAGE = 50
_LOOKED_AT = 20_000
"""letters that one search looks at"""
_AT_ONCE = 50
"""letters that are searched at one go"""
_FILTER = 200
_ACTIONS = {"redrive", "redrive-all", "discard", "discard-all"}


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
    ids, more = await _chosen(call, key, form, one, wanted)
    back = path("queues", key, "dead") + (f"?{urlencode({'filter': wanted})}" if wanted else "")
    if ids is not None and not ids:
        return see_other(call, back, "nothing")
    done = await _each(call, key, verb, ids)
    said = "more" if more else "redriven" if verb == "redrive" else "discarded"
    return see_other(call, back, said, done)


async def _chosen(
    call: Call, key: str, form: Form, one: str, wanted: str
) -> tuple[list[str] | None, bool]:
    if not one and form.text("action").endswith("-all"):
        if not wanted:
            return None, False
        found, number = list[str](), 0
        async for letter in _all(call, key):
            number += 1
            if _fits(letter, wanted):
                found.append(letter.task.id)
        return found, number >= _LOOKED_AT
    ids = [one] if one else form.all("ids")
    for task_id in ids:
        check_name("ids", task_id)
    return list(dict.fromkeys(ids)), False


async def _each(call: Call, key: str, verb: str, ids: list[str] | None) -> int:
    letters_of = call.hub.dead_letters
    move = letters_of.redrive if verb == "redrive" else letters_of.discard
    if ids is None:
        return await move(key)
    done = 0
    for start in range(0, len(ids), LIMITS.batch):
        done += await move(key, *ids[start : start + LIMITS.batch])
    return done


async def _all(call: Call, key: str, after: str | None = None) -> AsyncIterator[DeadLetter]:
    left = _LOOKED_AT
    while left > 0:
        size = min(LIMITS.batch, left)
        found = await call.hub.dead_letters.list(key, limit=size, after=after)
        for number, letter in enumerate(found):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            yield letter
        if len(found) < size:
            return
        left, after = left - size, found[-1].task.id


def _fits(letter: DeadLetter, wanted: str) -> bool:
    texts = [letter.reason, letter.task.id, letter.task.tenant or ""]
    texts += [failure.error for failure in letter.history]
    return any(wanted.lower() in text.lower() for text in texts)


async def _page(call: Call, key: str, status: int = 200, error: str | None = None) -> Response:
    wanted = call.request.query_params.get("filter", "").strip()[:_FILTER]
    after = call.word("after")
    found: list[DeadLetter] = []
    more = False
    if wanted:
        async for letter in _all(call, key, after):
            if _fits(letter, wanted):
                if len(found) == _PAGE:
                    more = True
                    break
                found.append(letter)
    else:
        page = await call.hub.dead_letters.list(key, limit=_PAGE + 1, after=after)
        found, more = list(page[:_PAGE]), len(page) > _PAGE
    sampler = sampler_of(call)
    sample = await sampler.fresh()
    view = View(call, "dead", key)
    ledger = view.total(sample)
    following = {"filter": wanted, "after": found[-1].task.id} if more else {}
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
        following=urlencode({name: text for name, text in following.items() if text}),
        dead=ledger.dead,
        ledger=figures.raw(ledger),
        texts=view.texts(sample),
        error=error,
    )
