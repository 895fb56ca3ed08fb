"""One task: its life so far, and what can be done about it."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec
from starlette.responses import Response

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_name
from taskqueue_core.tasks import State, TaskStatus
from taskqueue_server.dashboard.pages import path, render, sampler_of, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.dashboard.snapshot import LISTED
from taskqueue_server.dashboard.views import View
from taskqueue_server.routing.operations import Call

__all__ = ["act", "find", "task"]

_SHOWN = 4000
"""characters of a payload or a result"""
_BETWEEN = re.compile(r"[\s/,]+")


async def task(call: Call) -> Response:
    """Show a task."""
    return await _page(call, call.name("key"), call.name("id"))


async def act(call: Call) -> Response:
    """Cancel a live task, or redrive or discard a dead one."""
    key, task_id, form = call.name("key"), call.name("id"), await read_form(call)
    action, confirmed = form.text("action"), form.text("confirm")
    if action in {"cancel", "discard"} and confirmed != action:
        return await _page(call, key, task_id, 422, error="Tick the box to confirm it.")
    if action == "cancel":
        said = "cancelled" if await call.hub.control.cancel(key, task_id) else "not-live"
        return see_other(call, path("tasks", key, task_id), said)
    letters = call.hub.dead_letters
    moves = {"redrive": letters.redrive, "discard": letters.discard}
    if action not in moves:
        raise InvalidInput("action", "another word", "cancel, redrive or discard")
    number = await moves[action](key, task_id)
    said = f"{action}n" if action == "redrive" else "discarded"
    return see_other(
        call, path("tasks", key, task_id), said if number else "not-dead", number or None
    )


async def _page(
    call: Call, key: str, task_id: str, status: int = 200, error: str | None = None
) -> Response:
    control = call.hub.control
    (found,) = await control.statuses(key, task_id)
    (result,) = await control.results(key, task_id)
    dead = found is not None and found.state is State.DEAD
    letter = await call.hub.dead_letters.get(key, task_id) if dead else None
    sampler = sampler_of(call)
    sample = await sampler.fresh()
    view = View(call, "task", key, task_id)
    return await render(
        call,
        "task.html",
        404 if found is None else status,
        live=f"/live?view=task&key={path(key)[1:]}&id={path(task_id)[1:]}",
        sample=sample,
        shape=view.shape(sample, found),
        key=key,
        id=task_id,
        task=found,
        steps=_steps(found),
        result=_pretty(result),
        letter=letter,
        payload=_pretty(letter.task.payload) if letter else None,
        texts=view.texts(sample),
        error=error,
    )


def _steps(found: TaskStatus | None) -> list[tuple[str, str]]:
    """Return the steps of a task's life with where it stands: ``past``, ``now`` or ``ahead``."""
    if found is None:
        return []
    end = State.DONE if found.state.live else found.state
    steps = [State.SCHEDULED] if found.state is State.SCHEDULED else []
    steps += [State.WAITING, State.IN_FLIGHT, end]
    here = steps.index(found.state)
    place = ["past"] * here + ["now"] + ["ahead"] * (len(steps) - here - 1)
    if found.state in (State.EXPIRED, State.CANCELLED, State.DISCARDED):
        steps, place = [State.WAITING, found.state], ["past", "now"]
    return [
        (state.value.replace("_", " "), where) for state, where in zip(steps, place, strict=True)
    ]


def _pretty(text: bytes | None) -> tuple[str, int] | None:
    """Return JSON text for people, cut, and how many characters were left out."""
    if text is None:
        return None
    if len(text) <= 16 * _SHOWN:
        # What was stored by other means than ours, or is nested without end, is shown as it is.
        with suppress(msgspec.DecodeError, RecursionError):
            text = msgspec.json.format(text, indent=2)
    shown = text.decode(errors="replace")
    return shown[:_SHOWN], max(0, len(shown) - _SHOWN)


async def find(call: Call) -> Response:
    """Go to a task by its key and id, or look for an id in every queue that may be seen."""
    asked = call.request.query_params.get("q", "").strip()
    words = [word for word in _BETWEEN.split(asked[:500]) if word]
    if len(words) in (1, 2):
        try:
            for word in words:
                check_name("q", word)
        except InvalidInput:
            words = []
    if len(words) == 2:  # noqa: PLR2004 - a key and an id
        return see_other(call, path("tasks", *words))
    sample = await sampler_of(call).fresh()
    keys = sample.keys(call.may)
    if len(words) == 1 and words[0] in keys:
        return see_other(call, path("queues", words[0]))
    found: list[TaskStatus] = []
    if len(words) == 1:
        for key in keys[:LISTED]:
            found += [one for one in await call.hub.control.statuses(key, words[0]) if one]
    if len(found) == 1:
        return see_other(call, path("tasks", found[0].key, found[0].task_id))
    status = 200 if found or not asked else 404
    return await render(
        call, "find.html", status, query=asked[:200], found=found, sought=bool(words)
    )
