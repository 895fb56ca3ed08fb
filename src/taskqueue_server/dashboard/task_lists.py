"""The page with the tasks of a queue in a state or with a tag, and actions on several of them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple
from urllib.parse import urlencode

from starlette.responses import Response

from taskqueue_core.authoring.listings import BY_TIME, ENDED, Query, tag_name
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import TaskPage, TaskSummary, count_tagged, has, listing_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.tasks import State
from taskqueue_core.times import parse_time
from taskqueue_server.context.server import read_each
from taskqueue_server.dashboard.pages import path, render, see_other
from taskqueue_server.dashboard.settings_form import Form, read_form
from taskqueue_server.routing.operations import RequestContext

_PAGE = 50
_MOST_READ = 100_000
"""number of records after which a page in a browser that has found few tasks reads no more by itself"""
_MAX_DIGITS = 6
_AT_ONCE = 20
"""number of tasks that an action changes at the same time"""
_READS = 10
"""maximum number of calls to the store for the preview of an action, or for an erasure"""
_SHOWN = 20
"""number of tasks whose ids a preview shows"""
ACTIONS = {
    State.WAITING: ("cancel",),
    State.IN_FLIGHT: ("cancel",),
    State.BLOCKED: ("cancel",),
    State.SCHEDULED: ("run", "cancel"),
    State.DEAD: ("redrive", "discard"),
}
"""what can be done to the tasks in a state"""
LABELS = {"run": "Run now", "cancel": "Cancel", "redrive": "Redrive", "discard": "Discard"}
_NOTICES = {
    "run": "due-now",
    "cancel": "all-cancelled",
    "redrive": "redriven",
    "discard": "discarded",
}


class TaskFilter(NamedTuple):
    """What a list shows, as in the query of its page. Empty texts select nothing.

    ``since`` and ``until`` are times as a field of a form has them: in UTC, without a time zone, to the second.
    """

    state: str = ""
    tag: str = ""
    tenant: str = ""
    worker: str = ""
    newest: str = ""
    since: str = ""
    until: str = ""

    @classmethod
    def of(cls, call: RequestContext, form: Form | None = None) -> TaskFilter:
        """Return the filter in the query of a page, or in its form; waiting tasks by default.

        Times are left out where the form has no fields for them. A time that is relative gets one meaning here.
        """
        query = call.request.query_params
        given = [(form.text(name) if form else query.get(name, "")).strip() for name in cls._fields]
        chosen = cls(*given)
        if not chosen.state and not chosen.tag:
            chosen = chosen._replace(state=State.WAITING.value)
        if not chosen.by_time:
            return chosen._replace(since="", until="")
        now = call.context.backend.now()
        return chosen._replace(
            since=time_field(chosen.since, now), until=time_field(chosen.until, now)
        )

    @property
    def by_time(self) -> bool:
        """Whether times may limit the list."""
        return self.state in BY_TIME and not self.tag

    @property
    def query(self) -> str:
        """The query of the page that shows this list."""
        return urlencode({name: text for name, text in self._asdict().items() if text})

    @property
    def narrow(self) -> bool:
        """Whether tasks of one state are skipped, so that a page may end before it is full."""
        return bool(self.state and (self.tenant or self.worker or self.tag))

    def times(self, now: float) -> tuple[float | None, float | None]:
        """Return ``since`` and ``until`` in Unix seconds; ``None`` for none. Raises `InvalidInput`."""
        return (
            parse_time("since", self.since, now) if self.since else None,
            parse_time("until", self.until, now) if self.until else None,
        )

    async def read(self, call: RequestContext, key: str, after: str | None, limit: int) -> TaskPage:
        """Return a page of the list. Raises `InvalidInput`."""
        try:
            state = State(self.state) if self.state else None
        except ValueError:
            raise InvalidInput("state", "an unknown state", f"one of: {', '.join(State)}") from None
        since, until = self.times(call.context.backend.now())
        return await listing_of(call.context.backend).tasks(
            key,
            state=state,
            tag=self.tag or None,
            tenant=self.tenant or None,
            worker=self.worker or None,
            since=since,
            until=until,
            after=after,
            limit=limit,
            newest=bool(self.newest),
        )


async def tasks(call: RequestContext) -> Response:
    """Show a page of the tasks in a state or with a tag."""
    return await _page(call, call.name("key"), TaskFilter.of(call))


async def act(call: RequestContext) -> Response:
    """Show what an action would do to the selected tasks, or to all in the list; do it if this was confirmed."""
    key, form = call.name("key"), await read_form(call)
    action, chosen, ids = form.text("action"), TaskFilter.of(call, form), form.all("ids")
    if action == "erase" and chosen.tag:
        return await _erase(call, key, chosen, form)
    if action not in LABELS:
        return see_other(f"{path('queues', key, 'tasks')}?{chosen.query}", "nothing")
    for task_id in ids:
        check_name("ids", task_id)
    ids = list(dict.fromkeys(ids))[: LIMITS.batch]
    if form.text("confirm") == action:
        number = await _act(call, key, action, ids)
        shown = chosen.query or "all"
        call.note(action, key, tasks=number, details=" ".join([shown, "ids:", *ids]))
        back = f"{path('queues', key, 'tasks')}?{chosen.query}"
        return see_other(back, _NOTICES[action] if number else "unchanged", number)
    following = None
    if form.text("what") == "all":
        found, following = await _matching(call, key, chosen)
        ids = [task.task_id for task in found if action in ACTIONS.get(task.state, ())]
    if not ids:
        return see_other(f"{path('queues', key, 'tasks')}?{chosen.query}", "nothing")
    return await render(
        call,
        "tasks_preview.html",
        key=key,
        action=action,
        label=LABELS[action],
        ids=ids,
        shown=_SHOWN,
        chosen=chosen,
        more=following is not None,
    )


async def _erase(call: RequestContext, key: str, chosen: TaskFilter, form: Form) -> Response:
    """Show how many tasks have a tag; erase them if this was confirmed, as many as one request may."""
    listing, back = (
        listing_of(call.context.backend),
        f"{path('queues', key, 'tasks')}?{chosen.query}",
    )
    settings, details = await call.context.control.settings(key), f"tag={chosen.tag}"
    if form.text("confirm") != "erase":
        found = await count_tagged(listing, key, chosen.tag)
        return await render(
            call, "tasks_erase.html", key=key, tag=chosen.tag, found=found, back=back, journal=settings.journal,
        )  # fmt: skip
    Query(key=key, tag=chosen.tag).check(settings)
    await call.begin("erase", key, details=details)
    number, more = 0, True
    for _ in range(_READS):
        erased = await listing.erase(key, chosen.tag)
        number, more = number + erased.count, erased.more
        if not more:
            break
    call.note("erase", key, tasks=number, details=details)
    return see_other(back, "erased-some" if more else "erased", number)


async def _matching(
    call: RequestContext, key: str, chosen: TaskFilter
) -> tuple[list[TaskSummary], str | None]:
    """Return the first tasks of a list, as many as one action may change, and where the list continues."""
    found: list[TaskSummary] = []
    after = None
    for _ in range(_READS):
        page = await chosen.read(call, key, after, LIMITS.batch - len(found))
        found += page.tasks
        after = page.next
        if after is None or len(found) == LIMITS.batch:
            break
    return found, after


async def _act(call: RequestContext, key: str, action: str, ids: list[str]) -> int:
    """Do an action to the tasks with these ids. Return the number of tasks that it has changed."""
    control, dead_letters = call.context.control, call.context.dead_letters
    if action in ("redrive", "discard"):
        move = dead_letters.redrive if action == "redrive" else dead_letters.discard
        return await move(key, *ids) if ids else 0
    if action == "cancel":
        done = await read_each(partial(control.cancel, key), ids, _AT_ONCE)
        for task_id in ids:
            call.context.waiters.check_now(key, task_id)
        return sum(done)
    now = call.context.backend.now()
    return sum(await read_each(partial(control.reschedule, key, at=now), ids, _AT_ONCE))


async def _page(call: RequestContext, key: str, chosen: TaskFilter) -> Response:
    able, error, page = has(call.context.backend, Capability.LISTING), None, TaskPage()
    query = call.request.query_params
    after, shown, read = query.get("after"), _number(query, "shown"), _number(query, "read")
    settings = await call.context.control.settings(key)
    if able:
        try:
            page = await chosen.read(call, key, after, max(1, _PAGE - shown))
        except InvalidInput as refused:
            error = str(refused)
    states = {task.state for task in page.tasks}
    actions = [name for name in LABELS if any(name in ACTIONS.get(each, ()) for each in states)]
    following = f"{chosen.query}&{urlencode({'after': page.next})}" if page.next else None
    shown, read = shown + len(page.tasks), read + page.looked_at
    reads_on = chosen.narrow and following and shown < _PAGE and read < _MOST_READ
    return await render(
        call,
        "tasks.html",
        200 if error is None else 422,
        key=key,
        able=able,
        error=error,
        chosen=chosen,
        tasks=page.tasks,
        shown=shown,
        looked_at=read,
        actions=actions if call.is_allowed(key, ("admin",)) else [],
        erases=bool(chosen.tag) and call.is_allowed(key, ("admin",)),
        labels=LABELS,
        states=[each.value for each in State],
        ended=[each.value for each in ENDED],
        index=settings.index,
        keeps=settings.keep_ended > 0,
        known_tag=not chosen.tag or tag_name(chosen.tag) in settings.index,
        paged=after is not None,
        more=f"{following}&shown={shown}&read={read}" if reads_on else None,
        now=call.context.backend.now(),
        reverse=chosen._replace(newest="" if chosen.newest else "true").query,
        following=following,
    )


def time_field(text: str, now: float) -> str:
    """Return a time as a field of a form has it; the text itself if it is no time, which is then refused."""
    try:
        return f"{datetime.fromtimestamp(int(parse_time('', text, now)), UTC):%Y-%m-%dT%H:%M:%S}"
    except (ValueError, OverflowError):
        return text


def _number(query: Mapping[str, str], name: str) -> int:
    """Return the number that a page in a browser adds to its query when it reads on; 0 without one."""
    text = query.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else 0
