"""Functions shared by the HTTP handlers of the API and of the dashboard page."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import unquote_to_bytes

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_label
from taskqueue_core.tasks import TaskStatus
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.service import Dispatcher
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Handler, Operation, RequestContext, Scope

NAME = "dispatch"
"""name of the extension, and key of the dispatcher in the server's state"""


def operation(prefix: str, method: str, path: str, handler: Handler, **fields: Any) -> Operation:
    """Return an operation whose id consists of ``prefix`` and the name of its handler."""
    return Operation(
        id=f"{prefix}_{handler.__name__}",
        method=method,
        path=path,
        handler=handler,
        scope=Scope.HANDLER,
        strict=True,
        **fields,
    )


def dispatcher_of(call: RequestContext) -> Dispatcher:
    """Return the dispatcher of this server."""
    return cast("Dispatcher", call.context.extension_state[NAME])


def model_of(call: RequestContext) -> str:
    """Return the model that is named at the end of the path.

    Raises `InvalidInput` if the name is not valid, and `ProblemError` if the client may not access the model.
    """
    model: str = call.request.path_params["model"]
    # The framework replaces bytes that are not UTF-8; the result could be the name of another model.
    try:
        unquote_to_bytes(call.request.scope["raw_path"]).decode()
    except UnicodeDecodeError:
        raise InvalidInput("model", "bytes that are not UTF-8", "printable text") from None
    check_label("model", model)
    call.demand(queue_of(model))
    return model


def label_of(call: RequestContext, name: str) -> str | None:
    """Return a query parameter that holds the name of a model, or ``None`` if it is absent. Raises `InvalidInput`."""
    text = call.request.query_params.get(name)
    if text is not None:
        check_label(name, text)
    return text


async def job_of(call: RequestContext) -> TaskStatus:
    """Return the task status of the job whose id is in the path. Raises `InvalidInput`, or `ProblemError` (404).

    A client that may not access the job's model gets the same answer as for an unknown job, so that it cannot find ids
    by guessing.
    """
    matches = await dispatcher_of(call).jobs.find(call.name("job_id"))
    if matches is None or not call.is_allowed(matches[0]):
        raise unknown_job()
    return matches[1]


def unknown_job() -> ProblemError:
    """Return the 404 error for a job that is unknown or that the client may not access."""
    return ProblemError(
        404,
        "unknown_job",
        "job not found: unknown id, expired record, or a model that this token may not use",
    )
