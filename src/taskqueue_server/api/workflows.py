"""Workflows: publish, add steps, list, look up, cancel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.responses import Response

from taskqueue_core.authoring.listings import CURSOR_CHARACTERS
from taskqueue_core.queue_workflows import QueueWorkflows
from taskqueue_core.tasks import Confirmation
from taskqueue_core.workflow_list import LISTED
from taskqueue_core.workflows import (
    InvalidWorkflow,
    WorkflowPage,
    WorkflowStatus,
    WorkflowStep,
    WorkflowSummary,
    workflow_of,
)
from taskqueue_server.api.rights import LOOKING_UP, READING
from taskqueue_server.api.workflow_models import (
    StepIn,
    StepsIn,
    WorkflowCancelled,
    WorkflowConfirmation,
    WorkflowIn,
)
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Operation, Query, RequestContext, Scope, answer
from taskqueue_server.routing.parameters import link

_PAGE = 20


def _workflows(call: RequestContext) -> QueueWorkflows:
    return call.context.queue.workflows


async def publish(call: RequestContext) -> Response:
    """Publish a workflow: all of its steps, or none. Repeating the request with the same id is harmless.

    The token must permit publishing to the queue of each step, and reading the results of each task that a step waits
    for. The steps are published soon after the response. The id of the task of a step is the id of the workflow, a dot
    and the name of the step. The same id with other steps gives 409.
    """
    body = await call.body(WorkflowIn)
    steps = _steps(call, body.steps)
    confirmation = await _workflows(call).put(steps, id=body.id)
    return _confirm(confirmation, confirmation.task_id)


async def add(call: RequestContext) -> Response:
    """Add steps to a workflow, for a handler that runs one of its steps: all of them, or none. Idempotent.

    They are published once the task ``by`` is done, so ack it after this request; if it fails, they are not. A task can
    add steps once: the same steps again give 200, and others 409. The name of an added step is the name of the step
    ``by``, a colon and its own. The token must permit consuming from the queue of ``by``, or publishing to it, and what
    publishing a workflow with these steps needs. A step that has ended, or whose workflow is cancelled,
    gives 422, and a workflow that is not known 404.
    """
    body = await call.body(StepsIn)
    by, workflow = body.by.to_ref("by"), call.name("id")
    if workflow_of(by) != workflow:
        raise InvalidWorkflow("by.task_id", "a step of another workflow", "one of that in the path")
    call.demand(by.key, ("consume", *READING), "the key of by")
    confirmation = await _workflows(call).add(_steps(call, body.steps), by=by)
    return _confirm(confirmation, workflow)


def _confirm(confirmation: Confirmation, workflow: str) -> Response:
    out = WorkflowConfirmation(id=workflow, status=confirmation.status)
    return answer(out, 201 if confirmation.status == "accepted" else 200)


def _steps(call: RequestContext, given: Sequence[StepIn]) -> list[WorkflowStep]:
    """Return steps that the client may publish. Raises `ProblemError`, and `InvalidInput` for a wrong one."""
    now = call.context.backend.now()
    steps = [step.to_step(now, place) for place, step in enumerate(given)]
    _demand(call, steps)
    return steps


def _demand(call: RequestContext, steps: list[WorkflowStep]) -> None:
    """Raise `ProblemError` unless the client may publish to the queues of all steps, and read their other parents."""
    for key in {step.key for step in steps}:
        call.demand(key, name="the key of a step")
    for key in {parent.key for step in steps for parent in step.others}:
        call.demand(key, READING, "the key of a task in after")


async def workflows(call: RequestContext) -> Response:
    """List workflows: first those whose steps are not all published, then the others, newest first.

    The response has those that the token may read: with a right for the queue of each step, or for all queues while the
    steps are not all published. Repeat the request with ``next`` as ``after`` until the response has no ``next``; a
    page may be short or empty although more pages follow. ``counts`` has the number of steps in each state. A workflow
    is remembered for a week.
    """
    after, limit = call.request.query_params.get("after"), call.number("limit", _PAGE, LISTED)
    found, following = await visible(call, after, limit)
    page = WorkflowPage(workflows=tuple(map(WorkflowSummary.of, found)), next=following)
    return answer(page, headers=link(call, following))


async def visible(
    call: RequestContext, after: str | None, limit: int
) -> tuple[tuple[WorkflowStatus, ...], str | None]:
    """Return a page of the workflows that the client may see, and where the next page begins."""

    def is_shown(found: WorkflowStatus) -> bool:
        allowed = all(call.is_allowed(step.key) for step in found.steps)
        return allowed and not _is_unclear(call, found)

    return await _workflows(call).page(after, limit, is_shown)


async def known(call: RequestContext) -> WorkflowStatus:
    """Return the workflow in the path. Raises `ProblemError` if it is not known, or the client lacks the right.

    Until the steps say what the right is, a client without the right for all queues gets only the state.
    """
    found = await _workflows(call).get(call.name("id"))
    if found is None:
        raise ProblemError(404, "unknown_workflow", "there is no workflow with this id")
    for key in {step.key for step in found.steps}:
        call.demand(key, name="the key of a step")
    if _is_unclear(call, found):
        return WorkflowStatus(id=found.id, state=found.state)
    return found


async def workflow(call: RequestContext) -> Response:
    """Return what became of a workflow and its steps.

    ``state`` is ``stored`` while its steps are not all published, ``running``, ``held`` if only dead letters keep it
    from continuing, or ``ended``. The status of a step is null if it is not published, or its record was deleted. The
    token needs the right for the queue of each step.
    """
    return answer(await known(call))


async def cancel(call: RequestContext) -> Response:
    """Cancel a workflow: what is blocked or waiting ends as cancelled, and what runs is revoked. Idempotent.

    The order is carried out soon after the response. ``cancelled`` is false if the workflow has ended. While its steps
    are not all published, a token needs the right for all queues; repeat the request later.
    """
    return answer(WorkflowCancelled(await cancelled(call, await known(call))))


async def cancelled(call: RequestContext, found: WorkflowStatus) -> bool:
    """Cancel the workflow that `known` has returned. Return False if it has ended. Raises `ProblemError`."""
    if _is_unclear(call, found):
        raise ProblemError(
            409, "not_published", "the steps are not all published yet: repeat the request later"
        )
    if call.operates:
        call.note("cancel workflow", details=f"workflow={found.id}")
    return await _workflows(call).cancel(found.id)


def _is_unclear(call: RequestContext, found: WorkflowStatus) -> bool:
    """Return whether it is not known yet which rights the client needs, and it does not have them for all queues."""
    if found.steps or call.identity is None:
        return False
    return not any(map(call.identity.is_allowed, call.verbs))


_ID = "/v1/workflows/{id}"
_EXAMPLE = {
    "id": "cat-17",
    "steps": [
        {"name": "small", "key": "resize", "payload": {"image": "cat.png"}},
        {
            "name": "mail",
            "key": "emails",
            "payload": {"size": {"$input": 0}},
            "after": ["small"],
            "inputs": [0],
        },
    ],
}
_ADDED_EXAMPLE = {
    "by": {"key": "split", "task_id": "cat-17.split"},
    "steps": [{"name": "small", "key": "resize", "payload": {"image": "cat.png"}}],
}
_operation = partial(Operation, tag="workflows", verb=("publish", "admin"), scope=Scope.HANDLER)
OPERATIONS = (
    _operation(
        "POST",
        "/v1/workflows",
        publish,
        {201: WorkflowConfirmation, 200: WorkflowConfirmation},
        id="workflows_publish",
        verb="publish",
        body=WorkflowIn,
        problems=(409, 429),
        example=_EXAMPLE,
    ),
    _operation(
        "POST",
        f"{_ID}/steps",
        add,
        {201: WorkflowConfirmation, 200: WorkflowConfirmation},
        id="workflows_add",
        verb="publish",
        body=StepsIn,
        problems=(404, 409, 429),
        example=_ADDED_EXAMPLE,
    ),
    _operation(
        "GET",
        "/v1/workflows",
        workflows,
        {200: WorkflowPage},
        id="workflows_list",
        verb=LOOKING_UP,
        query=(
            Query(
                "limit",
                {"type": "integer", "minimum": 1, "maximum": LISTED, "default": _PAGE},
                "maximum number of workflows on a page",
            ),
            Query(
                "after",
                {"type": "string", "pattern": rf"^[0-9]\.[A-Za-z0-9_-]{{0,{CURSOR_CHARACTERS}}}$"},
                "the `next` of the previous page",
            ),
        ),
        response_headers=("Link",),
    ),
    _operation(
        "GET",
        _ID,
        workflow,
        {200: WorkflowStatus},
        id="workflows_status",
        verb=LOOKING_UP,
        problems=(404,),
    ),
    _operation(
        "POST",
        f"{_ID}/cancel",
        cancel,
        {200: WorkflowCancelled},
        id="workflows_cancel",
        problems=(404, 409),
    ),
)
