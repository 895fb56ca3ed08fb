"""Single tasks: publish, look up, cancel, retry."""

from __future__ import annotations

from starlette.responses import Response

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_time
from taskqueue_core.queue import instant
from taskqueue_core.server.bodies import JSON
from taskqueue_core.server.models import Cancelled, ConfirmationOut, RetryIn, TaskIn
from taskqueue_core.server.operations import Call, Operation, Scope, answer
from taskqueue_core.server.problems import ProblemError, refusal_status, retry_after
from taskqueue_core.tasks import Confirmation, Published, Refusal, TaskStatus

__all__ = ["OPERATIONS"]

_STATUS = {
    Published.ACCEPTED: 201,
    Published.DUPLICATE: 200,
    Published.CONFLICT: 409,
}
_CONFIRMATIONS = dict.fromkeys((*_STATUS.values(), *map(refusal_status, Refusal)), ConfirmationOut)


async def publish(call: Call) -> Response:
    """Publish one task. Sending it again with the same id is harmless.

    Refused for now: 429 where the queue or the tenant's part of it is full, 503 where its intake is paused or the whole
    store is full. Refused for good: 409 where the queue has moved, the code says so then.
    """
    task = (await call.body(TaskIn)).to_task(call.hub.backend.now())
    call.demand(task.key)
    (confirmation,) = await call.hub.queue.publish_many([task])
    return _confirmed(confirmation)


async def retry(call: Call) -> Response:
    """Schedule the next attempt of a task, live, dead, ended or forgotten. Idempotent by the token."""
    asked = await call.body(RetryIn)
    now = call.hub.backend.now()
    if asked.task.id is None:
        raise InvalidInput("task.id", "nothing", "the id of the task")
    at = instant(now, "delay", asked.delay, "at", asked.at)
    if at is None:
        raise InvalidInput("at", "nothing", "at or delay")
    check_time("at", at)
    token = asked.token
    if token is not None and not (0 < len(token) <= LIMITS.name and token.isprintable()):
        allowed = f"1 to {LIMITS.name} printable characters"
        raise InvalidInput("token", f"text of length {len(token)}", allowed)
    error = None if asked.error is None else asked.error[: LIMITS.text]
    task = asked.task.to_task(now)
    call.demand(task.key)
    confirmation = await call.hub.backend.publisher.schedule_retry(
        task, at, error=error, token=token
    )
    return _confirmed(confirmation)


def _confirmed(confirmation: Confirmation) -> Response:
    if confirmation.status is not Published.REFUSED:
        return answer(ConfirmationOut.of(confirmation), _STATUS[confirmation.status])
    headers = {}
    if confirmation.code is not Refusal.MOVED:
        headers["retry-after"] = retry_after(confirmation.retry_after)
    return answer(ConfirmationOut.of(confirmation), refusal_status(confirmation.code), headers)


async def status(call: Call) -> Response:
    """Say what is known of a task."""
    (found,) = await call.hub.control.statuses(call.name("key"), call.name("id"))
    if found is None:
        raise ProblemError(404, "unknown_task", "no such task, or forgotten")
    return answer(found)


async def result(call: Call) -> Response:
    """Return a task's result, as the worker wrote it."""
    (found,) = await call.hub.control.results(call.name("key"), call.name("id"))
    if found is None:
        raise ProblemError(404, "no_result", "no result, not yet or not any more")
    return Response(found, media_type=JSON)


async def cancel(call: Call) -> Response:
    """End a live task as cancelled, wherever it is; a running one is revoked."""
    return answer(Cancelled(await call.hub.control.cancel(call.name("key"), call.name("id"))))


OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/tasks",
        handler=publish,
        verb="publish",
        scope=Scope.HANDLER,
        body=TaskIn,
        answers=_CONFIRMATIONS,
        problems=(503,),
    ),
    Operation(
        method="POST",
        path="/v1/retries",
        handler=retry,
        verb="publish",
        scope=Scope.HANDLER,
        body=RetryIn,
        answers={201: ConfirmationOut, 200: ConfirmationOut},
        problems=(503,),
    ),
    Operation(
        method="GET",
        path="/v1/tasks/{key}/{id}",
        handler=status,
        verb="publish",
        answers={200: TaskStatus},
        problems=(404, 503),
    ),
    Operation(
        method="GET",
        path="/v1/tasks/{key}/{id}/result",
        handler=result,
        verb="publish",
        answers={200: None},
        problems=(404, 503),
    ),
    Operation(
        method="DELETE",
        path="/v1/tasks/{key}/{id}",
        handler=cancel,
        verb="publish",
        answers={200: Cancelled},
        problems=(503,),
    ),
)
