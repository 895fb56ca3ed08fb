"""The page of the dead letters of all queues: how many match a filter in each, and their redrive."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlencode

from starlette.responses import Response

from taskqueue_core.limits import check_name
from taskqueue_server.context.audit import record_action
from taskqueue_server.context.server import read_each
from taskqueue_server.dashboard.dead_matches import (
    IN_ONE,
    MAX_FILTER,
    Matches,
    matches_of,
    move_all,
    preview,
)
from taskqueue_server.dashboard.pages import poller_of, render, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import RequestContext

_QUEUES = 200
"""maximum number of queues on the page"""
_AT_ONCE = 8
"""number of queues whose dead letters are read, or changed, at the same time"""
_MOST_READ = 100_000
"""maximum number of dead letters that are read for the page"""


async def dead_everywhere(call: RequestContext) -> Response:
    """Show the queues with dead letters, and how many match the filter in each."""
    search = call.request.query_params.get("filter", "").strip()[:MAX_FILTER]
    matches, left_out = await _matches(call, search, call.verbs)
    return await render(
        call,
        "dead_everywhere.html",
        search=search,
        matches=[each for each in matches if each.count != 0 or not each.complete],
        dead=sum(each.dead for each in matches),
        number=sum(each.count or 0 for each in matches),
        left_out=left_out,
        redrives=any(each.count and call.is_allowed(each.key, ("admin",)) for each in matches),
    )


async def act(call: RequestContext) -> Response:
    """Show what a redrive would change in which queues; do it if this was confirmed, with an entry for each queue."""
    form = await read_form(call)
    search, keys = form.text("filter").strip()[:MAX_FILTER], form.all("keys")[:_QUEUES]
    back = "/dead" + (f"?{urlencode({'filter': search})}" if search else "")
    if form.text("confirm") != "redrive":
        matches, left_out = await _matches(call, search, ("admin",))
        found = [each for each in matches if each.count]
        left_out += sum(each.count is None for each in matches)
        return await preview(call, None, search, found, left_out)
    for key in keys:
        check_name("keys", key)
        call.demand(key)

    async def redrive(key: str) -> tuple[int, bool]:
        done, more = await move_all(call, key, "redrive", search, form)
        details = f"filter={search}" if search else "all"
        entry = call.note("redrive", key, tasks=done, details=f"{details} in all queues")
        call.noted = None
        await record_action(call.context.backend, entry)
        return done, more

    moved = await read_each(redrive, list(dict.fromkeys(keys)), _AT_ONCE)
    number = sum(done for done, _ in moved)
    poller_of(call).outdate()
    if any(more for _, more in moved):
        return see_other(back, "more", number)
    return see_other(back, "redriven" if number else "nothing", number or None)


async def _matches(
    call: RequestContext, search: str, verbs: Sequence[str]
) -> tuple[list[Matches], int]:
    """Return the matches in the queues with dead letters that the client may use, and how many queues are left out.

    The queues with the fewest dead letters are read first, because the number of dead letters that are read is limited.
    """
    snapshot = await poller_of(call).fresh()
    if snapshot.error is not None:
        detail = f"the store does not respond ({snapshot.error})"
        raise ProblemError(503, "store", detail, headers={"retry-after": "1"})
    numbers = {key: reading.ledger.dead for key, reading in snapshot.readings.items()}
    keys = [key for key, dead in numbers.items() if dead and call.is_allowed(key, verbs)]
    keys.sort(key=numbers.__getitem__)
    chosen, left = list[str](), _MOST_READ
    for key in keys[:_QUEUES]:
        left -= min(numbers[key], IN_ONE) if search else 1
        if left >= 0:
            chosen.append(key)

    async def read(key: str) -> Matches:
        return await matches_of(call, key, numbers[key], search)

    found = await read_each(read, chosen, _AT_ONCE)
    found += [Matches(key, numbers[key]) for key in keys[len(chosen) : _QUEUES]]
    found.sort(key=lambda each: (-(each.count or 0), each.key))
    return found, len(keys[_QUEUES:])
