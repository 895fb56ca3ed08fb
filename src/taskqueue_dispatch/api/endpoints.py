"""HTTP operations that register, list, drain and remove endpoints."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from taskqueue_core.limits import LIMITS
from taskqueue_dispatch.api.models import (
    EndpointIn,
    EndpointOut,
    ModelOut,
    ModelsOut,
    RegisterIn,
    Removed,
)
from taskqueue_dispatch.handler_helpers import dispatcher_of, label_of, operation
from taskqueue_dispatch.names import queue_of
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Query, RequestContext, answer
from taskqueue_server.routing.parameters import LIMIT, link
from taskqueue_server.routing.schemas import LABEL

_PAGE = 100


async def register(call: RequestContext) -> Response:
    """Add or change an endpoint: the URL and the slots of a model on a server. The change takes effect at once.

    The capacity of the model's queue changes with the slots. An endpoint that was draining or removed is used again.
    ``together`` limits the running jobs of the whole server, so the token must cover all models of the server.
    """
    body = await call.body(RegisterIn)
    call.demand(queue_of(body.model))
    registry = dispatcher_of(call).registry
    for view in await registry.models():
        if any(info.endpoint.server == body.server for info in view.endpoints):
            call.demand(view.key)
    info = await registry.register(
        body.model,
        body.server,
        body.endpoint,
        body.slots,
        priority=body.priority,
        reports=body.reports,
        together=body.together,
    )
    return answer(EndpointOut.of(info))


async def endpoints(call: RequestContext) -> Response:
    """Return a page of the models that the token covers, sorted by name, with their endpoints and the slots in use.

    To read the next page, send ``next`` as ``after``, or use the URL in the header ``Link``. The last page has neither.
    """
    limit, after = call.number("limit", _PAGE, LIMITS.batch), label_of(call, "after")
    if (model := label_of(call, "model")) is not None:
        call.demand(queue_of(model))
    views = sorted(
        (
            view
            for view in await dispatcher_of(call).registry.models()
            if call.is_allowed(view.key)
            and (after is None or view.model > after)
            and (model is None or view.model == model)
        ),
        key=lambda view: view.model,
    )
    following = views[limit - 1].model if len(views) > limit else None
    page = [ModelOut.of(view) for view in views[:limit]]
    return answer(ModelsOut(models=page, next=following), headers=link(call, following))


async def drain(call: RequestContext) -> Response:
    """Stop sending jobs to an endpoint; running jobs continue. Register the endpoint again to undo this. Idempotent."""
    body = await _named(call)
    if not await dispatcher_of(call).registry.drain(body.model, body.server):
        raise ProblemError(404, "unknown_endpoint", "the model has no endpoint on this server")
    _note(call, "drain endpoint", body)
    views = await dispatcher_of(call).registry.models()
    for view in views:
        for info in view.endpoints:
            if (view.model, info.endpoint.server) == (body.model, body.server):
                return answer(EndpointOut.of(info))
    raise ProblemError(404, "unknown_endpoint", "the endpoint has been removed")


async def remove(call: RequestContext) -> Response:
    """Remove an endpoint. Its running jobs continue, and the model's queued jobs stay queued. Idempotent."""
    body = await _named(call)
    removed = await dispatcher_of(call).registry.remove(body.model, body.server)
    _note(call, "remove endpoint", body)
    return answer(Removed(removed))


def _note(call: RequestContext, action: str, body: EndpointIn) -> None:
    details = f"model={body.model} server={body.server}"
    call.note(action, queue_of(body.model), details=details)


async def _named(call: RequestContext) -> EndpointIn:
    body = await call.body(EndpointIn)
    call.demand(queue_of(body.model))
    return body


_MODEL = Query("model", LABEL, "only this model", example="zimg")
_AFTER = Query("after", LABEL, "the `next` of the previous page", example="zimg")
_NAMED = {"model": "zimg", "server": "gpu-1"}
_operation = partial(operation, "endpoints", verb="admin", tag="models")
OPERATIONS = (
    _operation(
        "POST",
        "/admin/register",
        register,
        body=RegisterIn,
        example={**_NAMED, "endpoint": "http://10.0.0.4:9000/generate", "slots": 2},
        answers={200: EndpointOut},
        problems=(503,),
    ),
    _operation(
        "GET",
        "/admin/endpoints",
        endpoints,
        query=(_MODEL, LIMIT, _AFTER),
        answers={200: ModelsOut},
        response_headers=("Link",),
        problems=(503,),
    ),
    _operation(
        "POST",
        "/admin/drain",
        drain,
        body=EndpointIn,
        example=_NAMED,
        answers={200: EndpointOut},
        problems=(404, 503),
    ),
    _operation(
        "POST",
        "/admin/remove",
        remove,
        body=EndpointIn,
        example=_NAMED,
        answers={200: Removed},
        problems=(503,),
    ),
)
