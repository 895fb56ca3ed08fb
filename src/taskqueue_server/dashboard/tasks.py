"""The page of one task, and the search for tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import msgspec
from starlette.responses import Response

from taskqueue_core.application.encoding import shown_in_place
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.tasks import State, TaskStatus
from taskqueue_server.dashboard.pages import path, poller_of, render, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.dashboard.snapshot import LISTED
from taskqueue_server.dashboard.views import DashboardView
from taskqueue_server.routing.operations import RequestContext

_SHOWN = 4000
"""maximum number of characters that are shown of a payload or a result"""
_BETWEEN = re.compile(r"[\s/,]+")


async def task(call: RequestContext) -> Response:
    """Show a task."""
    return await _page(call, call.name("key"), call.name("id"))


async def act(call: RequestContext) -> Response:
    """Cancel a live task, or redrive or discard a dead letter."""
    key, task_id, form = call.name("key"), call.name("id"), await read_form(call)
    action, confirmed = form.text("action"), form.text("confirm")
    if action in {"cancel", "discard"} and confirmed != action:
        return await _page(call, key, task_id, 422, error="Tick the box to confirm.")
    if action == "cancel":
        cancelled = await call.context.control.cancel(key, task_id)
        call.note("cancel", key, tasks=int(cancelled), details=f"id={task_id}")
        notice = "cancelled" if cancelled else "not-live"
        return see_other(path("tasks", key, task_id), notice)
    dead_letters = call.context.dead_letters
    moves = {"redrive": dead_letters.redrive, "discard": dead_letters.discard}
    if action not in moves:
        raise InvalidInput("action", "an unknown value", "cancel, redrive or discard")
    number = await moves[action](key, task_id)
    call.note(action, key, tasks=number, details=f"id={task_id}")
    notice = f"{action}n" if action == "redrive" else "discarded"
    return see_other(path("tasks", key, task_id), notice if number else "not-dead", number or None)


async def _page(
    call: RequestContext, key: str, task_id: str, status: int = 200, error: str | None = None
) -> Response:
    control = call.context.control
    (statuses,) = await control.statuses(key, task_id)
    operates = call.is_allowed(key, ("admin",))
    result = (await control.results(key, task_id))[0] if operates else None
    dead = statuses is not None and statuses.state is State.DEAD
    dead_letter = await call.context.dead_letters.get(key, task_id) if dead else None
    snapshot = await poller_of(call).fresh()
    return await DashboardView(call, "task", key, task_id).render(
        snapshot,
        404 if statuses is None else status,
        task=statuses,
        steps=_steps(statuses),
        result=pretty(result),
        dead_letter=dead_letter,
        payload=pretty(dead_letter.task.payload, dead_letter.task.headers)
        if dead_letter and operates
        else None,
        error=error,
    )


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


async def find(call: RequestContext) -> Response:
    """Find a task by key and id, a queue by key, or a task by id in up to `LISTED` queues that the client may see."""
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
    statuses: list[TaskStatus] = []
    if len(names) == 1:
        for key in keys[:LISTED]:
            statuses += [
                status for status in await call.context.control.statuses(key, names[0]) if status
            ]
    if len(statuses) == 1:
        return see_other(path("tasks", statuses[0].key, statuses[0].task_id))
    status = 200 if statuses or not requested else 404
    return await render(
        call, "find.html", status, query=requested[:200], found=statuses, searched=bool(names)
    )
