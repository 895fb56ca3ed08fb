"""The page of one worker: what it runs now, and what it ran in a range of time, in all queues."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from taskqueue_core.authoring.listings import Query
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import TaskSummary, has
from taskqueue_core.capabilities.listing import ERROR_CHARACTERS
from taskqueue_core.errors import InvalidInput
from taskqueue_core.tasks import State
from taskqueue_server.context.server import read_each
from taskqueue_server.context.statistics import AT_ONCE
from taskqueue_server.dashboard.pages import poller_of, render
from taskqueue_server.dashboard.task_lists import TaskFilter, time_field
from taskqueue_server.dashboard.views import sees_all
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import RequestContext

_QUEUES = 200
"""maximum number of queues that are read for a page"""
_SHOWN = 100
"""maximum number of tasks on a page, and of tasks that are read of each list of a queue"""
_READS = 3
"""maximum number of calls to the store for a list of a queue, each of which reads a bounded number of records"""
_RECENT = "-15m"
_NAMED = 10


class RunList(msgspec.Struct):
    """The tasks of one queue in one state that the worker runs or ran, newest first."""

    chosen: TaskFilter
    """the filter of the queue's own list of them"""
    tasks: list[TaskSummary]
    more: bool
    """whether the queue may have more"""


class QueueRuns(msgspec.Struct):
    """What the worker runs and ran in one queue."""

    key: str
    lists: list[RunList]
    keeps: bool = True
    """whether the queue keeps ended tasks"""

    @property
    def shown(self) -> bool:
        """Whether there is anything to show."""
        return any(one.tasks or one.more for one in self.lists)


class Names(msgspec.Struct):
    """The first names of queues, and the number of the others."""

    shown: list[str]
    others: int

    @classmethod
    def of(cls, keys: list[str]) -> Names:
        """Return the names as a page shows them."""
        return cls(keys[:_NAMED], max(0, len(keys) - _NAMED))


async def worker(call: RequestContext) -> Response:
    """Show what a worker runs, and what it ran in a range of time, in the queues that the client may see."""
    name, query, now = call.name("name"), call.request.query_params, call.context.backend.now()
    chosen = TaskFilter(
        worker=name,
        newest="true",
        since=time_field(query.get("since", _RECENT).strip(), now),
        until=time_field(query.get("until", "").strip(), now),
    )
    snapshot = await poller_of(call).fresh()
    if snapshot.error is not None:
        detail = f"the store does not respond ({snapshot.error})"
        raise ProblemError(503, "store", detail, headers={"retry-after": "1"})
    workers = snapshot.workers_of(call.is_allowed)
    serving = next((one for one in workers if one.worker_id == name), None)
    own = () if serving is None else serving.keys
    # The worker may have served other queues before, so these are read after its own.
    keys = sorted(snapshot.keys(call.is_allowed), key=lambda key: key not in own)
    runs, error = list[QueueRuns](), None
    if able := has(call.context.backend, Capability.LISTING):
        try:
            since, until = chosen.times(now)
            Query(key=name, state=State.DONE, worker=name, since=since, until=until)
            runs = await read_each(
                lambda key: _runs(call, key, chosen, until), keys[:_QUEUES], AT_ONCE
            )
        except InvalidInput as refused:
            error = str(refused)
    found = [task for run in runs for one in run.lists for task in one.tasks]
    found.sort(key=_newest_first)
    return await render(
        call,
        "worker.html",
        200 if error is None else 422,
        name=name,
        serving=serving,
        everything=sees_all(call),
        able=able,
        error=error,
        chosen=chosen,
        tasks=await _with_errors(call, found[:_SHOWN]),
        found=len(found),
        earlier=_earlier(found, chosen, now),
        runs=[run for run in runs if run.shown],
        unkept=Names.of([run.key for run in runs if not run.keeps]),
        read=min(len(keys), _QUEUES),
        number=len(keys),
        now=now,
    )


async def _runs(
    call: RequestContext, key: str, chosen: TaskFilter, until: float | None
) -> QueueRuns:
    """Return what the worker runs and ran in one queue."""
    running = chosen._replace(state=State.IN_FLIGHT.value, since="", until="")
    now = await _read(call, key, running)
    if until is not None:
        now.tasks = [task for task in now.tasks if (task.delivered_at or 0.0) < until]
    dead = await _read(call, key, chosen._replace(state=State.DEAD.value))
    try:
        done = await _read(call, key, chosen._replace(state=State.DONE.value))
    except InvalidInput:  # the times and the name are valid, so the queue does not keep ended tasks
        return QueueRuns(key, [now, dead], keeps=False)
    return QueueRuns(key, [now, done, dead])


async def _read(call: RequestContext, key: str, chosen: TaskFilter) -> RunList:
    found, after = list[TaskSummary](), None
    for _ in range(_READS):
        page = await chosen.read(call, key, after, _SHOWN - len(found))
        found += page.tasks
        after = page.next
        if after is None or len(found) == _SHOWN:
            break
    return RunList(chosen, found, more=after is not None)


async def _with_errors(call: RequestContext, tasks: list[TaskSummary]) -> list[TaskSummary]:
    """Return the tasks with the last error of each dead letter, of which lists have the reason only."""
    dead: dict[str, list[str]] = {}
    for task in tasks:
        if task.state is State.DEAD:
            dead.setdefault(task.key, []).append(task.task_id)
    ask = call.context.control.statuses
    answers = await read_each(lambda key: ask(key, *dead[key]), list(dead), AT_ONCE)
    errors = {
        (status.key, status.task_id): status.last_failure.error[:ERROR_CHARACTERS]
        for queue in answers
        for status in queue
        if status is not None and status.last_failure is not None
    }
    return [
        msgspec.structs.replace(task, error=errors.get((task.key, task.task_id), task.error))
        for task in tasks
    ]


def _newest_first(task: TaskSummary) -> tuple[bool, float]:
    """Order tasks in flight by their start, before all others by their end."""
    if task.state is State.IN_FLIGHT:
        return False, -(task.delivered_at or task.updated_at)
    return True, -task.updated_at


def _earlier(found: list[TaskSummary], chosen: TaskFilter, now: float) -> str | None:
    """Return the end of the range of the next page, as a field has it; ``None`` if all tasks found are shown."""
    if len(found) <= _SHOWN or found[_SHOWN].state is State.IN_FLIGHT:
        return None
    end = time_field(str(int(found[_SHOWN].updated_at) + 1), now)
    since, until = chosen.since, chosen.until
    return end if end > since and (not until or end < until) else None
