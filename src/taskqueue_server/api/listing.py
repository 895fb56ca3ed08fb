"""Lists of the tasks of a queue, and the details of one task."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.responses import Response

from taskqueue_core.authoring.listings import CURSOR_CHARACTERS, checked_page
from taskqueue_core.authoring.listings import Query as ListQuery
from taskqueue_core.capabilities import TaskDetail, TaskSummary, count_tagged, listing_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import WireTask, to_wire_task
from taskqueue_core.tasks import Failure, State, TaskStatus
from taskqueue_core.times import RECENT
from taskqueue_server.auth.access import OBSERVING
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Operation, Query, RequestContext, answer
from taskqueue_server.routing.parameters import LIMIT, link, time_query
from taskqueue_server.routing.schemas import NAME

_PAGE = 100

_TIME = {"type": "string", "minLength": 1, "maxLength": 50}


class TasksOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of tasks. If there is a ``next``, pass it as ``after`` for the next page, even if this one is empty.

    ``looked_at`` is the number of records that the store read for the page, at most 3,000 if a filter skips many.
    ``since`` and ``until`` are what the request said, in Unix seconds: pass these with ``next``.
    """

    tasks: tuple[TaskSummary, ...]
    next: str | None = None
    looked_at: int
    since: float | None = None
    until: float | None = None


class TaskFieldsOut(WireTask, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a task.

    ``payload`` and ``headers`` are those of a live task or a dead letter, and are shown to tokens with the right
    ``admin`` only.
    """

    payload: Raw | UnsetType = UNSET  # type: ignore[assignment] # it may be absent here only
    headers: dict[str, str] | UnsetType = UNSET  # type: ignore[assignment] # it may be absent here only


class DetailOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the store knows of a task besides its status. A field is omitted if the store does not know it.

    ``delivered_at`` and ``worker_id`` are those of the last delivery. ``history`` has the most recent failures, oldest
    first.
    """

    published_at: float | None = None
    delivered_at: float | None = None
    worker_id: str | None = None
    history: tuple[Failure, ...] = ()
    task: TaskFieldsOut

    @classmethod
    def of(cls, detail: TaskDetail, *, contents: bool) -> DetailOut:
        """Convert the detail of a task; ``contents`` says whether to show its payload and its headers."""
        fields: dict[str, Any] = msgspec.structs.asdict(to_wire_task(detail.task))
        state = detail.status.state
        if not contents or not (state.live or state is State.DEAD):
            fields |= {"payload": UNSET, "headers": UNSET, "content_digest": None}
        return cls(
            published_at=detail.published_at,
            delivered_at=detail.delivered_at,
            worker_id=detail.worker_id,
            history=detail.history,
            task=TaskFieldsOut(**fields),
        )


class Erase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tasks to erase: those of the queue that have this tag."""

    tag: str
    limit: int = LIMITS.batch
    """maximum number of tasks, from 1 to 1000"""
    dry_run: bool = False
    """whether the tasks are only counted, at most 10,000 of them"""


class ErasureOut(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased: ``tasks`` by the state in which they were, and the ``count`` of all."""

    tasks: dict[State, int]
    count: int
    more: bool
    journal: bool


class TaskOut(TaskStatus, frozen=True, kw_only=True):
    """The status of a task, with ``detail`` if the request asks for it."""

    detail: DetailOut | UnsetType = UNSET


def unknown_task() -> ProblemError:
    """Return the problem for a task that the store does not know."""
    return ProblemError(404, "unknown_task", "task not found, or its record has expired")


async def detailed(call: RequestContext, key: str, task_id: str) -> TaskOut:
    """Return the status of a task with its details. Raises `ProblemError` if the task is unknown."""
    found = await listing_of(call.context.backend).task(key, task_id)
    if found is None:
        raise unknown_task()
    detail = DetailOut.of(found, contents=call.is_allowed(key, ("admin",)))
    return TaskOut(**msgspec.structs.asdict(found.status), detail=detail)


async def tasks(call: RequestContext) -> Response:
    """List the tasks of a queue that are in a state, or that have a tag, without payloads and results.

    ``state`` or ``tag`` is required. ``tag`` must be one that the queue's setting ``index`` names. ``worker`` needs the
    state ``in_flight`` or ``dead``, or an ended state of a queue with the setting ``keep_ended``. ``since`` and
    ``until`` need the state ``scheduled`` or ``dead`` or an ended state, and no tag. Ended tasks are listed while
    their records are stored. Repeat the request with ``next`` as ``after``, and the same filters and order, until the
    response has no ``next``; a page may be short or empty although more pages follow.
    """
    key, query = call.name("key"), call.request.query_params
    times = {name: time_query(call, name) for name in ("since", "until")}
    page = await listing_of(call.context.backend).tasks(
        key,
        state=_state(query.get("state")),
        tenant=call.query_name("tenant"),
        tag=call.text("tag"),
        worker=call.query_name("worker"),
        since=times["since"],
        until=times["until"],
        after=query.get("after"),
        limit=call.number("limit", _PAGE, LIMITS.batch),
        newest=call.flag("newest"),
    )
    shown = TasksOut(tasks=page.tasks, next=page.next, looked_at=page.looked_at, **times)
    exact = {name: f"{time:.9f}" for name, time in times.items() if time is not None}
    return answer(shown, headers=link(call, page.next, **exact))


async def erase(call: RequestContext) -> Response:
    """Erase tasks with a tag, whatever their state, and all that is stored of them. This cannot be undone.

    Tasks that have not ended are cancelled, also running ones, and dead letters are discarded; then their statuses,
    payloads, results, histories, events and tags are deleted. Counters remain. The queue's setting ``index`` must name
    the tag. One request erases at most ``limit`` tasks: repeat it until ``more`` is false. With ``dry_run``, tasks are
    only counted. If ``journal`` is true, the journal of the store still has the changes of these tasks, until it is
    trimmed.
    """
    key, asked = call.name("key"), await call.body(Erase)
    listing = listing_of(call.context.backend)
    settings, details = await call.context.control.settings(key), f"tag={asked.tag}"
    if asked.dry_run:
        found = await count_tagged(listing, key, asked.tag)
    else:
        ListQuery(key=key, tag=asked.tag).check(settings)
        limit = checked_page(asked.limit)
        await call.begin("erase", key, details=details)
        found = await listing.erase(key, asked.tag, limit=limit)
        call.note("erase", key, tasks=found.count, details=details)
    return answer(
        ErasureOut(tasks=found.tasks, count=found.count, more=found.more, journal=settings.journal)
    )


def _state(text: str | None) -> State | None:
    if text is None:
        return None
    try:
        return State(text)
    except ValueError:
        got = f"text of length {len(text)}"
        raise InvalidInput("state", got, f"one of: {', '.join(State)}") from None


DETAIL = Query(
    "detail",
    {"type": "boolean", "default": False},
    "whether to add what else the store knows of the task: its fields, its times, its worker and its failures",
    example=True,
)
OPERATIONS = (
    Operation(
        "GET",
        "/v1/queues/{key}/tasks",
        tasks,
        {200: TasksOut},
        id="listing_tasks",
        verb=OBSERVING,
        tag="tasks",
        query=(
            Query("state", {"enum": list(State)}, "only tasks in this state", example="in_flight"),
            Query("tenant", NAME, "only tasks of this tenant", example="acme"),
            Query(
                "tag",
                {"type": "string", "minLength": 1, "maxLength": LIMITS.tag},
                "only tasks with this tag, in the order of their publishes",
                example="user:42",
            ),
            Query("worker", NAME, "only tasks of this worker", example="worker-1"),
            Query(
                "since",
                _TIME,
                f"only tasks that ended, became dead letters or become available at this time or later: {RECENT}",
                example="-1h",
            ),
            Query("until", _TIME, "only tasks of which this was before this time"),
            LIMIT,
            Query(
                "after",
                {"type": "string", "pattern": f"^[A-Za-z0-9_-]{{1,{CURSOR_CHARACTERS}}}$"},
                "the `next` of the previous page",
            ),
            Query(
                "newest",
                {"type": "boolean", "default": False},
                "whether the order is the exact reverse",
            ),
        ),
        response_headers=("Link",),
    ),
    Operation(
        "POST",
        "/v1/queues/{key}/erase",
        erase,
        {200: ErasureOut},
        id="listing_erase",
        verb="admin",
        tag="tasks",
        body=Erase,
        example={"tag": "user:42", "dry_run": True},
    ),
)
