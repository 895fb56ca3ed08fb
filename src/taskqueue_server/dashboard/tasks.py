"""The page of one task, and the search for tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType

import msgspec
from starlette.responses import Response

from taskqueue_core.application.encoding import shown_in_place
from taskqueue_core.authoring.listings import tag_name
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import TaskDetail, TaskSummary, has, listing_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.tasks import State, Task, TaskStatus
from taskqueue_server.context.server import read_each
from taskqueue_server.context.statistics import AT_ONCE
from taskqueue_server.dashboard.pages import path, poller_of, render, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.dashboard.views import DashboardView
from taskqueue_server.routing.operations import RequestContext

_SEARCHED, _AT_ONCE = 500, 16
"""maximum number of queues in which a task is looked for by its id alone, and how many of them at the same time"""
_SHOWN = 4000
"""maximum number of characters that are shown of a payload or a result"""
_TAGGED = 20
"""maximum number of tasks with a tag that the search shows of each queue"""
_BETWEEN = re.compile(r"[\s/,]+")


async def task(call: RequestContext) -> Response:
    """Show a task."""
    return await _page(call, call.name("key"), call.name("id"))


async def act(call: RequestContext) -> Response:
    """Cancel a live task, let a scheduled one run now, or redrive or discard a dead letter."""
    key, task_id, form = call.name("key"), call.name("id"), await read_form(call)
    action, confirmed = form.text("action"), form.text("confirm")
    if action in {"cancel", "discard"} and confirmed != action:
        return await _page(call, key, task_id, 422, error="Tick the box to confirm.")
    if action == "cancel":
        cancelled = await call.context.control.cancel(key, task_id)
        call.note("cancel", key, tasks=int(cancelled), details=f"id={task_id}")
        notice = "cancelled" if cancelled else "not-live"
        return see_other(path("tasks", key, task_id), notice)
    if action == "run":
        moved = await call.context.control.reschedule(key, task_id, call.context.backend.now())
        call.note("reschedule", key, tasks=int(moved), details=f"id={task_id}")
        return see_other(path("tasks", key, task_id), "due-now" if moved else "unchanged", 1)
    dead_letters = call.context.dead_letters
    moves = {"redrive": dead_letters.redrive, "discard": dead_letters.discard}
    if action not in moves:
        raise InvalidInput("action", "an unknown value", "cancel, run, redrive or discard")
    number = await moves[action](key, task_id)
    call.note(action, key, tasks=number, details=f"id={task_id}")
    notice = f"{action}n" if action == "redrive" else "discarded"
    return see_other(path("tasks", key, task_id), notice if number else "not-dead", number or None)


async def _page(
    call: RequestContext, key: str, task_id: str, status: int = 200, error: str | None = None
) -> Response:
    control = call.context.control
    detail = await _detail(call, key, task_id)
    found = None if detail is None else detail.status
    operates = call.is_allowed(key, ("admin",))
    result = (await control.results(key, task_id))[0] if operates else None
    stored = found is not None and (found.state.live or found.state is State.DEAD)
    snapshot = await poller_of(call).fresh(key)
    return await DashboardView(call, "task", key, task_id).render(
        snapshot,
        404 if found is None else status,
        task=found,
        detail=detail,
        steps=_steps(found),
        times=[] if detail is None else _times(detail),
        result=pretty(result),
        payload=pretty(detail.task.payload, detail.task.headers)
        if detail and stored and operates
        else None,
        error=error,
    )


async def _detail(call: RequestContext, key: str, task_id: str) -> TaskDetail | None:
    """Return what the store knows of a task; without ``listing``, its status and a dead letter's fields."""
    if has(call.context.backend, Capability.LISTING):
        return await listing_of(call.context.backend).task(key, task_id)
    (status,) = await call.context.control.statuses(key, task_id)
    if status is None:
        return None
    dead = status.state is State.DEAD
    letter = await call.context.dead_letters.get(key, task_id) if dead else None
    if letter is not None:
        return TaskDetail(status=status, task=letter.task, history=letter.history)
    history = () if status.last_failure is None else (status.last_failure,)
    return TaskDetail(status=status, task=Task(key=key, id=task_id), history=history)


def _times(detail: TaskDetail) -> list[tuple[str, float, float | None]]:
    """Return what happened to a task and when, each with the seconds since the event before it."""
    status = detail.status
    events = [
        ("Published", detail.published_at),
        *((f"Attempt {failure.attempt} failed", failure.at) for failure in detail.history),
        ("Delivered", detail.delivered_at),
    ]
    if not status.state.live:
        events.append((status.state.value.capitalize(), status.updated_at))
    known = sorted([(at, name) for name, at in events if at is not None], key=lambda pair: pair[0])
    before = [None, *(at for at, _ in known)]
    return [
        (name, at, None if last is None else at - last)
        for (at, name), last in zip(known, before, strict=False)
    ]


def _steps(status: TaskStatus | None) -> list[tuple[str, str]]:
    """Return the states of a task's life in order, each with ``past``, ``now`` or ``ahead``."""
    if status is None:
        return []
    end = State.DONE if status.state.live else status.state
    before = status.state in (State.BLOCKED, State.SCHEDULED)
    steps = [status.state] if before else []
    steps += [State.WAITING, State.IN_FLIGHT, end]
    here = steps.index(status.state)
    position = ["past"] * here + ["now"] + ["ahead"] * (len(steps) - here - 1)
    if status.state in (State.EXPIRED, State.CANCELLED, State.DISCARDED):
        steps, position = [State.WAITING, status.state], ["past", "now"]
    return [
        (state.value.replace("_", " "), where) for state, where in zip(steps, position, strict=True)
    ]


def pretty(
    text: bytes | None, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, int] | None:
    """Return formatted and truncated JSON, and the number of characters cut off; ``None`` for no text.

    ``headers`` are those of the task, if ``text`` is a payload. What a codec has encoded is not shown.
    """
    if text is None:
        return None
    if (encoded := shown_in_place(text, headers)) is not None:
        return encoded, 0
    if len(text) <= 16 * _SHOWN:
        # Text that is not valid JSON, or that is nested too deeply, is shown unchanged.
        with suppress(msgspec.DecodeError, RecursionError):
            text = msgspec.json.format(text, indent=2)
    shown = text.decode(errors="replace")
    return shown[:_SHOWN], max(0, len(shown) - _SHOWN)


async def _is_workflow(call: RequestContext, name: str) -> bool:
    """Return whether there is a workflow with this id that the client may see."""
    if len(name) > LIMITS.workflow_id or not has(call.context.backend, Capability.AFTER):
        return False
    try:
        found = await call.context.queue.workflows.get(name)
    except InvalidInput:  # no id of a workflow
        return False
    return found is not None and all(call.is_allowed(step.key) for step in found.steps)


async def _by_id_or_tag(
    call: RequestContext, among: Sequence[str], names: Sequence[str], tag: str
) -> tuple[list[TaskStatus | TaskSummary], dict[str, int]]:
    """Return the tasks with an id, if there is only one name; otherwise the first ones with a tag, of each queue.

    The second value has the queues that have more tasks with the tag, with the number of those returned.
    """
    found, more = list[TaskStatus | TaskSummary](), dict[str, int]()
    if len(names) == 1:
        ask = call.context.control.statuses
        for answers in await read_each(lambda key: ask(key, names[0]), among, _AT_ONCE):
            found += filter(None, answers)
    if not found and has(call.context.backend, Capability.LISTING):
        listing = listing_of(call.context.backend)
        settings = await read_each(call.context.control.settings, among, AT_ONCE)
        by_key = zip(among, settings, strict=True)
        keys = [key for key, rules in by_key if tag_name(tag) in rules.index]
        with suppress(InvalidInput):  # no tag, or no longer one that is indexed
            look = partial(listing.tasks, tag=tag, limit=_TAGGED)
            for key, page in zip(keys, await read_each(look, keys, _AT_ONCE), strict=True):
                found += page.tasks
                if page.next is not None:
                    more[key] = len(page.tasks)
    return found, more


async def find(call: RequestContext) -> Response:
    """Find a task by key and id, a queue by key, or tasks by id or tag in `_SEARCHED` visible queues."""
    requested = call.request.query_params.get("q", "").strip()
    names = [name for name in _BETWEEN.split(requested[:500]) if name]
    if len(names) in (1, 2):
        try:
            for name in names:
                check_name("q", name)
        except InvalidInput:
            names = []
    if len(names) == 2:  # noqa: PLR2004 - two names: a key and an id
        return see_other(path("tasks", *names))
    snapshot = await poller_of(call).fresh()
    keys = snapshot.keys(call.is_allowed)
    if len(names) == 1 and names[0] in keys:
        return see_other(path("queues", names[0]))
    if len(names) == 1 and await _is_workflow(call, names[0]):
        return see_other(path("workflows", names[0]))
    found, more = await _by_id_or_tag(call, keys[:_SEARCHED], names, requested)
    if len(found) == 1:
        return see_other(path("tasks", found[0].key, found[0].task_id))
    status = 200 if found or not requested else 404
    return await render(
        call,
        "find.html",
        status,
        query=requested[:200],
        found=found,
        more=more,
        searched=bool(requested),
    )
