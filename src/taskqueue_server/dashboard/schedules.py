"""The pages of schedules: the list, and one schedule with its next and its last instants."""

from __future__ import annotations

from starlette.responses import Response

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Outcome, has
from taskqueue_core.capabilities.schedules import OVERLAP
from taskqueue_core.errors import InvalidInput, QueueFull, TaskQueueError
from taskqueue_core.schedule_status import ScheduleStatus
from taskqueue_core.schedules import Cron
from taskqueue_core.tasks import Published, Refusal
from taskqueue_server.api.schedules import known, visible
from taskqueue_server.dashboard import formatting
from taskqueue_server.dashboard.pages import path, render, see_other
from taskqueue_server.dashboard.settings_form import read_form
from taskqueue_server.dashboard.tasks import pretty
from taskqueue_server.routing.operations import RequestContext

_PAGE = 50
_NEXT = 10
_SKIPPED: dict[str, str] = {
    "late": "it was too late",
    "missed": "no server or worker ran",
    "too_many": "too many instants were missed",
    OVERLAP: "an earlier task had not ended",
    Refusal.NOT_UNIQUE: "an earlier task had not ended",
    **{code: "the queue refused the task" for code in Refusal if code is not Refusal.NOT_UNIQUE},
    Published.DUPLICATE: "its task was published before",
    Published.CONFLICT: "its id belongs to another task",
}
"""why no new task was published, by the result of an instant"""


async def schedules(call: RequestContext) -> Response:
    """Show a page of the schedules of the queues that the client may see, sorted by name."""
    after, able = call.query_name("after"), has(call.context.backend, Capability.SCHEDULES)
    shown, following = await visible(call, after, _PAGE) if able else ([], None)
    return await render(
        call,
        "schedules.html",
        rows=[(status, when(status), last(status)) for status in shown],
        following=following,
        paged=after is not None,
        able=able,
    )


async def schedule(call: RequestContext) -> Response:
    """Show a schedule."""
    return await _page(call, await known(call))


async def act(call: RequestContext) -> Response:
    """Run a schedule now, pause it or resume it."""
    found, form = await known(call), await read_form(call)
    action, queue = form.text("action"), call.context.queue
    back = path("schedules", found.name)
    if action == "pause":
        await queue.schedules.pause(found.name)
        call.note("pause schedule", found.key, details=f"schedule={found.name}")
        return see_other(back, "schedule-paused")
    if action == "resume":
        await queue.schedules.resume(found.name)
        call.note("resume schedule", found.key, details=f"schedule={found.name}")
        return see_other(back, "schedule-resumed")
    if action != "run":
        raise InvalidInput("action", "an unknown value", "run, pause or resume")
    try:
        confirmation = await queue.schedules.trigger(found.name)
    except QueueFull as error:
        return await _page(call, found, 409, error=f"Nothing was published: {error}.")
    details = f"schedule={found.name}"
    call.note("run schedule", found.key, tasks=int(confirmation.stored), details=details)
    accepted = confirmation.status is not Published.DUPLICATE
    return see_other(back, "schedule-run" if accepted else "schedule-overlap")


async def _page(
    call: RequestContext, status: ScheduleStatus, code: int = 200, error: str | None = None
) -> Response:
    instants: tuple[float, ...] = ()
    try:
        instants = await call.context.queue.schedules.next(status.name, _NEXT)
    except TaskQueueError:
        if status.problem is None:
            raise
    template = None if status.schedule is None else status.schedule.task
    return await render(
        call,
        "schedule.html",
        code,
        schedule=status,
        when=when(status),
        instants=instants,
        outcomes=[(outcome, reason(outcome)) for outcome in reversed(status.recent)],
        payload=pretty(bytes(template.payload), template.headers)
        if template is not None and call.is_allowed(status.key, ("admin",))
        else None,
        error=error,
    )


def when(status: ScheduleStatus) -> str:
    """Return the times of a schedule, for people."""
    if status.schedule is None:
        return "cannot be read"
    given = status.schedule.when
    if isinstance(given, Cron):
        return f"{given.expression} ({given.timezone})"
    return f"every {formatting.duration(given.seconds)}"


def reason(outcome: Outcome) -> str | None:
    """Return why no new task was published for an instant; ``None`` if one was."""
    if outcome.result in (Published.ACCEPTED, Published.REPLACED):
        return None
    return _SKIPPED.get(outcome.result, outcome.result)


def last(status: ScheduleStatus) -> Outcome | None:
    """Return what became of the last instant."""
    return status.recent[-1] if status.recent else None
