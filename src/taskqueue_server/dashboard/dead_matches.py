"""Dead letters that match the filter of a page: how many there are, and their redrive or discard after a preview."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.responses import Response

from taskqueue_core import dead_letter_filter
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has, listing_of
from taskqueue_core.tasks import DeadLetter, State
from taskqueue_server.dashboard.pages import render
from taskqueue_server.dashboard.settings_form import Form
from taskqueue_server.routing.operations import RequestContext

MAX_FILTER = 200
"""maximum number of characters of a filter"""
IN_ONE = 10_000
"""maximum number of dead letters of a queue that are read for one page"""


class TextFilter(dead_letter_filter.DeadLetterFilter, frozen=True, kw_only=True):
    """A filter for dead letters whose reason, errors, id, tenant or workers contain a text."""

    text: str

    @classmethod
    def by(cls, text: str, made: float) -> TextFilter:
        """Return a filter that searches for ``text`` and ignores case."""
        return cls(reason=None, error=None, before=None, made=made, text=text.lower())

    @property
    def lets_all_through(self) -> bool:
        """Whether the text is empty, so that every dead letter matches."""
        return not self.text

    def __contains__(self, dead_letter: DeadLetter) -> bool:
        texts = [dead_letter.reason, dead_letter.task.id, dead_letter.task.tenant or ""]
        for failure in dead_letter.history:
            texts += [failure.error, failure.worker or ""]
        return any(self.text in text.lower() for text in texts)


class Matches(msgspec.Struct, frozen=True):
    """The dead letters of one queue that match a filter."""

    key: str
    dead: int
    """number of all dead letters of the queue"""
    count: int | None = None
    """number of those that match; ``None`` if the queue was not read"""
    complete: bool = False
    """whether all dead letters of the queue were read"""
    newest: DeadLetter | None = None
    """the newest one that matches, of those that were read"""


async def matches_of(call: RequestContext, key: str, dead: int, search: str) -> Matches:
    """Return the matches in a queue with ``dead`` dead letters. It reads at most `IN_ONE` of them."""
    backend, dead_letters = call.context.backend, call.context.dead_letters
    if not search:
        newest = None
        if has(backend, Capability.LISTING):
            listed = await listing_of(backend).tasks(key, state=State.DEAD, newest=True, limit=1)
            for task in listed.tasks:
                newest = await dead_letters.get(key, task.task_id)
        return Matches(key, dead, dead, complete=True, newest=newest)
    found, following = await dead_letter_filter.page(
        dead_letters, key, TextFilter.by(search, backend.now()), limit=IN_ONE, after=None
    )
    return Matches(key, dead, len(found), following is None, found[-1] if found else None)


async def move_all(
    call: RequestContext, key: str, verb: Literal["redrive", "discard"], search: str, form: Form
) -> tuple[int, bool]:
    """Redrive or discard all that match. Return their number, and whether the queue may have more.

    With a filter, those that failed after the preview, whose time is in the form, stay.
    """
    dead_letters = call.context.dead_letters
    move = dead_letters.redrive if verb == "redrive" else dead_letters.discard
    if not search:
        return await move(key), False
    conditions = TextFilter.by(search, _made(form, call.context.backend.now()))
    done, following = await dead_letter_filter.act(dead_letters, key, conditions, move, after=None)
    return done, following is not None


def _made(form: Form, now: float) -> float:
    """Return the time of the preview that a form confirms; ``now`` without one."""
    try:
        made = float(form.text("made"))
    except ValueError:
        return now
    return made if 0 < made < now else now


async def preview(
    call: RequestContext,
    key: str | None,
    search: str,
    matches: Sequence[Matches],
    left_out: int = 0,
) -> Response:
    """Return the page that says how many dead letters would be redriven in which queues; ``key``: in this one only."""
    return await render(
        call,
        "dead_preview.html",
        key=key,
        search=search,
        matches=matches,
        number=sum(each.count or 0 for each in matches),
        complete=all(each.complete for each in matches),
        left_out=left_out,
        made=repr(call.context.backend.now()),
    )
