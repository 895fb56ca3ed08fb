"""HTTP operations for the configuration of a model, which operators change at run time."""

from __future__ import annotations

from functools import partial

from pydantic import ValidationError
from starlette.responses import Response

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, kind_of
from taskqueue_dispatch.handler_helpers import dispatcher_of, model_of, operation
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_server.routing import bodies
from taskqueue_server.routing.operations import RequestContext


async def config(call: RequestContext) -> Response:
    """Return the configuration in force: the defaults if the model has not been configured."""
    return _answer(await dispatcher_of(call).registry.config(model_of(call)))


async def configure(call: RequestContext) -> Response:
    """Replace the configuration. It takes effect at once, even for waiting jobs; omitted fields get their defaults."""
    model = model_of(call)
    body = await call.read(limit=LIMITS.document, name="document")
    # First decode the body as arbitrary JSON, so that invalid JSON gives the same error here as in every other
    # operation.
    bodies.decode(object, body)
    stored = await dispatcher_of(call).registry.configure(model, _read(body))
    call.note("configure model", queue_of(model), details=f"model={model}")
    return _answer(stored)


async def revert(call: RequestContext) -> Response:
    """Reset the configuration to the defaults, and return them. Idempotent."""
    model = model_of(call)
    stored = await dispatcher_of(call).registry.configure(model, None)
    call.note("configure model", queue_of(model), details=f"model={model} defaults")
    return _answer(stored)


def _read(text: bytes) -> ModelConfig:
    """Parse a configuration. The `InvalidInput` that it raises contains no value and no name of an unknown field."""
    try:
        return ModelConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    if fault["type"] == "extra_forbidden":
        known = ", ".join(ModelConfig.model_fields)
        raise InvalidInput("config", "an unknown field", known)
    field = str(fault["loc"][0]) if fault["loc"] else "config"
    allowed = fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if fault["type"] == "string_pattern_mismatch":
        allowed = "an ASCII path that begins with / and contains no space or #"
    raise InvalidInput(field, kind_of(fault["input"]), allowed)


def _answer(result: ModelConfig) -> Response:
    return Response(result.model_dump_json(), media_type=bodies.JSON)


_PATH = "/admin/model-configs/{model:path}"
_EXAMPLE = {
    "model_type": "async",
    "poll_endpoint_template": "/status/{id}",
    "poll_interval": 3,
    "max_poll_time": 1200,
}
_operation = partial(operation, "configs", verb="admin", tag="models")
OPERATIONS = (
    _operation("GET", _PATH, config, answers={200: ModelConfig}, problems=(503,)),
    _operation(
        "PUT",
        _PATH,
        configure,
        body=ModelConfig,
        example=_EXAMPLE,
        answers={200: ModelConfig},
        problems=(409, 503),
    ),
    _operation("DELETE", _PATH, revert, answers={200: ModelConfig}, problems=(409, 503)),
)
