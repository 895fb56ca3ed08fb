"""Tasks: publish, look up, wait for, reschedule, cancel and retry."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import dependencies_of
from taskqueue_core.concurrency import first_completed
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_time
from taskqueue_core.queue import instant
from taskqueue_core.tasks import Confirmation, Published, Refusal, State, Task, TaskStatus
from taskqueue_server.api.listing import DETAIL, TaskOut, detailed, unknown_task
from taskqueue_server.api.models import (
    Cancelled,
    Closed,
    ConfirmationOut,
    Rescheduled,
    RescheduleIn,
)
from taskqueue_server.api.rights import LOOKING_UP, READING, demand_to_publish
from taskqueue_server.api.task_models import RetryIn, RetryTaskIn, TaskIn
from taskqueue_server.context.waiters import MAX_WAIT
from taskqueue_server.problems import ProblemError, refusal_status, retry_after
from taskqueue_server.routing.bodies import JSON
from taskqueue_server.routing.operations import (
    Operation,
    Query,
    RequestContext,
    Scope,
    answer,
    unauthenticated,
)
from taskqueue_server.routing.parameters import IDEMPOTENCY_KEY, id_maker, reused

_STATUS = {
    Published.ACCEPTED: 201,
    Published.DUPLICATE: 200,
    Published.REPLACED: 200,
    Published.CONFLICT: 409,
}
_CONFIRMATIONS = dict.fromkeys((*_STATUS.values(), *map(refusal_status, Refusal)), ConfirmationOut)


WAIT = Query(
    "wait",
    {"type": "integer", "minimum": 0, "maximum": MAX_WAIT, "default": 0},
    "maximum number of seconds to wait for the end of the task",
    example=20,
)


def seconds(call: RequestContext) -> int:
    """Return the query parameter ``wait``, or 0 if it is absent. Raises `InvalidInput`."""
    return call.number("wait", 0, MAX_WAIT, lowest=0)


async def waited(call: RequestContext, status: TaskStatus | None, most: int) -> bool:
    """Wait up to ``most`` seconds for the end of a live task; return whether the task's status may have changed.

    Raises `ProblemError` if too many requests wait, or if the client loses its rights.
    """
    if not most or status is None or not status.state.live:
        return False
    with call.watch_access() as dismissed:
        gone = _client_left(call, dismissed)
        await call.context.waiters.wait(status.key, status.task_id, most, gone, call.client_name)
    if dismissed.is_set():
        raise unauthenticated()
    return True


async def _client_left(call: RequestContext, dismissed: asyncio.Event) -> None:
    """Return when the client has disconnected or lost its rights."""
    await first_completed(_hung_up(call), dismissed.wait())


async def _hung_up(call: RequestContext) -> None:
    while (await call.request.receive())["type"] != "http.disconnect":
        pass


async def publish(call: RequestContext) -> Response:
    """Publish one task. Repeating the request with the same id or ``Idempotency-Key`` is harmless.

    The same id with another payload gives 409; the same ``Idempotency-Key`` with another payload gives 422. The id
    and the header are remembered while the task is live, and for the queue's ``dedupe_window`` after its end.

    A task is refused temporarily with 429 if the queue or the tenant's share of the queue is full, and with 503 if the
    queue's intake is paused or the store is full. It is refused permanently with 409 and the code
    ``moved`` if the queue has the setting ``moved_to``.

    If another task holds the unique key in ``unique``, its id is in ``existing_id``: the status is ``duplicate`` or
    ``replaced`` with 200, or ``refused`` with 409 and the code ``not_unique``, as ``on_conflict`` says.

    A task with ``after`` waits for other tasks in the state ``blocked``. The token needs the right to read the results
    of each of them, that is ``publish`` or ``admin`` for its queue. A member of a ``batch`` that is closed is refused
    with 409 and the code ``batch_closed``.
    """
    id_of = id_maker(call)
    body = await call.body(TaskIn)
    task_id = id_of(body.key, body.id, 0)
    task = body.to_task(call.context.backend.now(), task_id)
    demand_to_publish(call, task)
    (confirmation,) = await call.context.queue.publish_many([task])
    if task_id is not None and confirmation.status is Published.CONFLICT:
        raise reused()
    return _confirmed(confirmation)


async def retry(call: RequestContext) -> Response:
    """Schedule the next attempt of a task. Requests with the same ``token`` schedule it once.

    A task that the store does not know is published instead, and may be refused like any publish. A task whose first
    attempt has not begun is not changed; the status is then ``duplicate``.
    """
    body = await call.body(RetryIn)
    now = call.context.backend.now()
    if body.task.id is None:
        raise InvalidInput("task.id", "nothing", "the id of the task")
    task = body.task.to_task(now)
    demand_to_publish(call, task)
    at = instant(now, "delay", body.delay, "at", body.at)
    if at is None:
        raise InvalidInput("at", "nothing", "a time, or a value for delay")
    return await _retry(call, task, at, body)


async def schedule_retry(call: RequestContext) -> Response:
    """Schedule the next attempt of this task, now or later. Requests with the same ``token`` schedule it once.

    A task that the store does not know is published instead, and may be refused like any publish. A task whose first
    attempt has not begun is not changed; the status is then ``duplicate``.

    Without ``payload``, a dead letter is retried with its stored fields. For any other task ``payload`` is required,
    because the store may no longer have it; without ``payload`` the response is 409.
    """
    key, task_id = call.name("key"), call.name("id")
    body = await call.body(RetryTaskIn)
    now = call.context.backend.now()
    at = instant(now, "delay", body.delay, "at", body.at)
    if body.payload is not UNSET:
        task = Task(key=key, id=task_id, payload=bytes(body.payload))
    elif dead_letter := await call.context.dead_letters.get(key, task_id):
        task = dead_letter.task
    else:
        raise ProblemError(
            409, "not_dead", "the task is not a dead letter; send its payload to schedule a retry"
        )
    return await _retry(call, task, now if at is None else at, body)


async def _retry(
    call: RequestContext, task: Task, at: float, body: RetryIn | RetryTaskIn
) -> Response:
    check_time("at", at)
    token = body.token
    if token is not None and not (0 < len(token) <= LIMITS.name and token.isprintable()):
        allowed = f"1 to {LIMITS.name} printable characters"
        raise InvalidInput("token", f"invalid text of length {len(token)}", allowed)
    # A retry passes every limit, so it needs a task that was accepted, and whose first attempt has begun.
    (found,) = await call.context.control.statuses(task.key, task.id)
    if found is None:
        unique = task.unique and msgspec.structs.replace(task.unique, debounce=None)
        at = max(at, task.not_before or at)
        first = msgspec.structs.replace(task, not_before=at, unique=unique)
        return _confirmed(*await call.context.queue.publish_many([first]))
    if found.attempt == 1 and found.state in {State.BLOCKED, State.SCHEDULED, State.WAITING}:
        duplicate = Published.DUPLICATE
        return _confirmed(Confirmation(key=task.key, task_id=task.id, status=duplicate))
    retained = None if body.error is None else body.error[: LIMITS.text]
    traceback = body.traceback
    if traceback and not (await call.context.control.settings(task.key)).keep_tracebacks:
        traceback = None
    return _confirmed(
        await call.context.backend.publisher.schedule_retry(
            task, at, error=retained, token=token, free=body.free, traceback=traceback
        )
    )


def _confirmed(confirmation: Confirmation) -> Response:
    if confirmation.status is not Published.REFUSED:
        return answer(ConfirmationOut.of(confirmation), _STATUS[confirmation.status])
    headers, refused = {}, refusal_status(confirmation.code)
    if refused != _STATUS[Published.CONFLICT]:  # waiting does not help against a conflict
        headers["retry-after"] = retry_after(confirmation.retry_after)
    return answer(ConfirmationOut.of(confirmation), refused, headers)


async def status(call: RequestContext) -> Response:
    """Return the status of a task.

    With ``wait``, the response is sent once the task has ended or become a dead letter, at the latest after ``wait``
    seconds. With ``detail``, it has what else the store knows of the task, under ``detail``. The payload and the
    headers are shown to tokens with the right ``admin`` only, and only while the task is live or a dead letter.
    """
    key, task_id = call.name("key"), call.name("id")
    most, detail = seconds(call), call.flag("detail")
    if detail and not most:
        return answer(await detailed(call, key, task_id))
    (found,) = await call.context.control.statuses(key, task_id)
    changed = await waited(call, found, most)
    if detail:
        return answer(await detailed(call, key, task_id))
    if changed:
        (found,) = await call.context.control.statuses(key, task_id)
    if found is None:
        raise unknown_task()
    return answer(found)


async def result(call: RequestContext) -> Response:
    """Return a task's result, as the worker returned it.

    With ``wait``, the response is sent once the task has ended or become a dead letter, at the latest after ``wait``
    seconds.
    """
    key, task_id = call.name("key"), call.name("id")
    most = seconds(call)
    (found,) = await call.context.control.results(key, task_id)
    if found is None and most:
        (known,) = await call.context.control.statuses(key, task_id)
        await waited(call, known, most)
        (found,) = await call.context.control.results(key, task_id)
    if found is None:
        raise ProblemError(
            404,
            "no_result",
            "no result: the task has not succeeded, its result has expired, or there was none",
        )
    return Response(found, media_type=JSON)


async def cancel(call: RequestContext) -> Response:
    """Cancel a live task: blocked, scheduled, waiting or running. A running task is revoked from its worker."""
    key, task_id = call.name("key"), call.name("id")
    cancelled = await call.context.control.cancel(key, task_id)
    call.context.waiters.check_now(key, task_id)
    if call.operates:
        call.note("cancel", key, tasks=int(cancelled), details=f"id={task_id}")
    return answer(Cancelled(cancelled))


async def reschedule(call: RequestContext) -> Response:
    """Give a blocked, waiting or scheduled task another time. Its attempt does not change.

    A task that is running, has ended or is unknown is not changed, nor is one whose attempt was delivered before: a
    task that was released or redriven comes back at once.
    """
    key, task_id = call.name("key"), call.name("id")
    body = await call.body(RescheduleIn)
    at = instant(call.context.backend.now(), "delay", body.delay, "at", body.at)
    if at is None:
        raise InvalidInput("at", "nothing", "a time, or a value for delay")
    check_time("at", at)
    changed = await call.context.control.reschedule(key, task_id, at)
    if call.operates:
        call.note("reschedule", key, tasks=int(changed), details=f"id={task_id}")
    return answer(Rescheduled(changed))


async def close(call: RequestContext) -> Response:
    """Close a batch: no more members are accepted, and it ends once all of its members have ended.

    The response says whether the task is a batch that has not ended.
    """
    batch = TaskRef(call.name("key"), call.name("id"))
    return answer(Closed(await dependencies_of(call.context.backend).close(batch)))


_EXAMPLE = {"key": "emails", "id": "order-4711", "payload": {"to": "a@example.org"}}
_RETRIED = {**_CONFIRMATIONS, 201: ConfirmationOut, 200: ConfirmationOut}
_publishing = partial(Operation, tag="tasks", verb="publish")
_operation = partial(Operation, tag="tasks", verb=READING)
OPERATIONS = (
    _publishing(
        "POST",
        "/v1/tasks",
        publish,
        _CONFIRMATIONS,
        id="tasks_publish",
        scope=Scope.HANDLER,
        headers=(IDEMPOTENCY_KEY,),
        body=TaskIn,
        example=_EXAMPLE,
    ),
    _publishing(
        "POST",
        "/v1/retries",
        retry,
        _RETRIED,
        id="tasks_retry",
        scope=Scope.HANDLER,
        body=RetryIn,
        example={"task": _EXAMPLE, "delay": 60, "token": "run 7"},
    ),
    _publishing(
        "POST",
        "/v1/tasks/{key}/{id}/retry",
        schedule_retry,
        _RETRIED,
        id="tasks_again",
        body=RetryTaskIn,
        example={"delay": 60, "token": "run 7"},
        problems=(409,),
    ),
    _operation(
        "GET",
        "/v1/tasks/{key}/{id}",
        status,
        {200: TaskOut},
        id="tasks_status",
        verb=LOOKING_UP,
        query=(WAIT, DETAIL),
        problems=(404, 429),
    ),
    _operation(
        "GET",
        "/v1/tasks/{key}/{id}/result",
        result,
        {200: None},
        id="tasks_result",
        query=(WAIT,),
        problems=(404, 429),
    ),
    _operation("DELETE", "/v1/tasks/{key}/{id}", cancel, {200: Cancelled}, id="tasks_cancel"),
    _operation(
        "POST",
        "/v1/tasks/{key}/{id}/reschedule",
        reschedule,
        {200: Rescheduled},
        id="tasks_reschedule",
        body=RescheduleIn,
        example={"delay": 60},
    ),
    _publishing(
        "POST",
        "/v1/tasks/{key}/{id}/close",
        close,
        {200: Closed},
        id="tasks_close",
    ),
)
