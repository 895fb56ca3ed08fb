"""The pages of workflows: the list, and one workflow with a drawing of its steps by state, and a table of them."""

from __future__ import annotations

from collections import Counter

import msgspec
from starlette.responses import Response

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.errors import InvalidInput
from taskqueue_core.task_state import State
from taskqueue_core.workflows import StepStatus, WorkflowStatus, WorkflowSummary, levels
from taskqueue_server.api.workflows import cancelled, known, visible
from taskqueue_server.dashboard.pages import path, render, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.routing.operations import RequestContext

_PAGE = 20
_NEEDED = (Capability.LISTING, Capability.AFTER, Capability.CONTROL, Capability.DEAD_LETTERS)
"""capabilities without which there is no list"""
_DRAWN = 200
"""maximum number of steps that are drawn"""
_WIDTH, _HEIGHT = 190, 44
"""size of the box of a step, in pixels"""
_RIGHT, _DOWN = 250, 60
"""distance between the boxes of two levels, and between two boxes of one level"""
_NAME = 24
"""maximum number of characters of a name in a box"""
_COLOURS = {
    State.DONE: "ok",
    State.IN_FLIGHT: "ok",
    State.DEAD: "bad",
    State.EXPIRED: "bad",
    State.WAITING: "idle",
    State.SCHEDULED: "idle",
}


class Box(msgspec.Struct, frozen=True):
    """A step in the drawing."""

    step: StepStatus
    x: int
    y: int
    name: str
    colour: str


class Edge(msgspec.Struct, frozen=True):
    """A line from a parent to a child."""

    path: str
    holds: bool
    """whether the parent is a dead letter that holds the child"""


class Drawing(msgspec.Struct, frozen=True):
    """The steps of a workflow as boxes and lines."""

    width: int
    height: int
    boxes: list[Box]
    edges: list[Edge]


async def workflows(call: RequestContext) -> Response:
    """Show a page of the workflows whose queues the client may see, the newest first."""
    after = call.request.query_params.get("after")
    able = all(has(call.context.backend, name) for name in _NEEDED)
    found, following = await visible(call, after, _PAGE) if able else ((), None)
    return await render(
        call,
        "workflows.html",
        rows=[WorkflowSummary.of(status) for status in found],
        following=following,
        paged=after is not None,
        able=able,
    )


async def workflow(call: RequestContext) -> Response:
    """Show a workflow."""
    return await _page(call, await known(call))


async def act(call: RequestContext) -> Response:
    """Cancel a workflow."""
    found, form = await known(call), await read_form(call)
    if form.text("action") != "cancel":
        raise InvalidInput("action", "an unknown value", "cancel")
    if form.text("confirm") != "cancel":
        return await _page(call, found, 422, error="Tick the box to confirm.")
    done = await cancelled(call, found)
    return see_other(path("workflows", found.id), "workflow-cancelled" if done else "not-live")


async def _page(
    call: RequestContext, found: WorkflowStatus, code: int = 200, error: str | None = None
) -> Response:
    counts = Counter(step.state for step in found.steps)
    return await render(
        call,
        "workflow.html",
        code,
        workflow=found,
        drawing=draw(found),
        counts={
            "not known" if state is None else state.value: number
            for state, number in counts.items()
        },
        colour=colour_of,
        error=error,
    )


def colour_of(state: State | None) -> str:
    """Return the colour of a state, by the name that the style sheet has for it."""
    return "paused" if state is None else _COLOURS.get(state, "paused")


def draw(found: WorkflowStatus) -> Drawing | None:
    """Return a drawing; ``None`` if there are no steps, or too many."""
    if not 0 < len(found.steps) <= _DRAWN:
        return None
    boxes: dict[str, Box] = {}
    depth = {
        step.name: column for column, level in enumerate(levels(found.steps)) for step in level
    }
    rows: Counter[int] = Counter()
    for step in found.steps:
        column = depth[step.name]
        boxes[step.name] = Box(
            step,
            10 + column * _RIGHT,
            10 + rows[column] * _DOWN,
            step.name if len(step.name) <= _NAME else f"{step.name[: _NAME - 1]}…",
            colour_of(step.state),
        )
        rows[column] += 1
    edges = [
        _edge(boxes[parent], box)
        for box in boxes.values()
        for parent in box.step.after
        if isinstance(parent, str)
    ]
    return Drawing(
        width=20 + (len(rows) - 1) * _RIGHT + _WIDTH,
        height=20 + (max(rows.values()) - 1) * _DOWN + _HEIGHT,
        boxes=list(boxes.values()),
        edges=edges,
    )


def _edge(parent: Box, child: Box) -> Edge:
    x1, y1 = parent.x + _WIDTH, parent.y + _HEIGHT // 2
    x2, y2 = child.x, child.y + _HEIGHT // 2
    half = (x1 + x2) // 2
    status = child.step.status
    holds = status is not None and any(
        ref.key == parent.step.key and ref.task_id == parent.step.task_id for ref in status.held_by
    )
    return Edge(f"M{x1} {y1}C{half} {y1} {half} {y2} {x2} {y2}", holds)
