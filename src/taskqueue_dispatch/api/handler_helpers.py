"""What the handlers of the dispatcher's operations share."""

from __future__ import annotations

from typing import cast
from urllib.parse import unquote_to_bytes

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_label
from taskqueue_core.tasks import TaskStatus
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.service import Dispatcher
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import RequestContext

NAME = "dispatch"
"""of the part"""


def dispatcher_of(call: RequestContext) -> Dispatcher:
    """Return the dispatcher of this server."""
    return cast("Dispatcher", call.context.extension_state[NAME])


def model_of(call: RequestContext) -> str:
    """Return the model that the path ends with, which who asks may have to do with.

    Raises `InvalidInput` and `ProblemError`.
    """
    model: str = call.request.path_params["model"]
    try:  # what is not UTF-8 arrives here as another name, and may be somebody's
        unquote_to_bytes(call.request.scope["raw_path"]).decode()
    except UnicodeDecodeError:
        raise InvalidInput("model", "bytes that are not UTF-8", "printable text") from None
    check_label("model", model)
    call.demand(queue_of(model))
    return model


def label_of(call: RequestContext, name: str) -> str | None:
    """Return the name of a model from the query, if it is there. Raises `InvalidInput`."""
    text = call.request.query_params.get(name)
    if text is not None:
        check_label(name, text)
    return text


async def job_of(call: RequestContext) -> TaskStatus:
    """Return what is known of the task that the job in the path is. Raises `InvalidInput` and `ProblemError`.

    Who may have nothing to do with its model is told the same as where there is none: ids are not for guessing.
    """
    matches = await dispatcher_of(call).jobs.find(call.name("job_id"))
    if matches is None or not call.is_allowed(matches[0]):
        raise unknown_job()
    return matches[1]


def unknown_job() -> ProblemError:
    """Return the problem of a job that is not known, or not to who asks."""
    return ProblemError(
        404,
        "unknown_job",
        "job not found: unknown id, expired record, or a model that this token may not use",
    )
