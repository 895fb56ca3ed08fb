"""The settings of a queue as a resource, and its two pauses as verbs."""

from __future__ import annotations

from starlette.responses import Response

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.operating import pause_queue, read_settings, reset_settings
from taskqueue_core.server import bodies
from taskqueue_core.server.operations import Call, Operation, Query

__all__ = ["OPERATIONS"]

_VERSIONS = 999_999_999


async def read(call: Call) -> Response:
    """Return the settings in force."""
    return _answer(await call.hub.control.settings(call.name("key")))


async def replace(call: Call) -> Response:
    """Replace the settings; ``version`` must be the one in force. They act on the next call."""
    key = call.name("key")
    body = await bodies.read(call.request)
    bodies.decode(object, body)  # what is not JSON has the answer that it has everywhere
    return _answer(await call.hub.control.configure(key, read_settings(body)))


async def reset(call: Call) -> Response:
    """Return to the defaults; ``version`` must be the one in force. They act on the next call."""
    key = call.name("key")
    version = call.number("version", None, _VERSIONS, lowest=0)
    return _answer(await reset_settings(call.hub.control, key, version=version))


async def pause(call: Call) -> Response:
    """Hand out nothing more, or with ``intake`` accept nothing more. The other goes on. Idempotent."""
    return await _pause(call, paused=True)


async def resume(call: Call) -> Response:
    """Hand out again, or with ``intake`` accept again. Idempotent."""
    return await _pause(call, paused=False)


async def _pause(call: Call, *, paused: bool) -> Response:
    key, intake = call.name("key"), call.flag("intake")
    return _answer(await pause_queue(call.hub.control, key, intake=intake, paused=paused))


def _answer(found: QueueSettings) -> Response:
    return Response(found.model_dump_json(), media_type=bodies.JSON)


_KEY = "/v1/queues/{key}"
_INTAKE = Query("intake", {"type": "boolean", "default": False}, "what publishers put in, instead")
_VERSION = Query(
    "version",
    {"type": "integer", "minimum": 0, "maximum": _VERSIONS},
    "the version in force",
    required=True,
)
OPERATIONS = (
    Operation(
        method="GET",
        path=f"{_KEY}/settings",
        handler=read,
        verb="admin",
        answers={200: QueueSettings},
        problems=(503,),
    ),
    Operation(
        method="PUT",
        path=f"{_KEY}/settings",
        handler=replace,
        verb="admin",
        body=QueueSettings,
        answers={200: QueueSettings},
        problems=(409, 503),
    ),
    Operation(
        method="DELETE",
        path=f"{_KEY}/settings",
        handler=reset,
        verb="admin",
        query=(_VERSION,),
        answers={200: QueueSettings},
        problems=(409, 503),
    ),
    *(
        Operation(
            method="POST",
            path=f"{_KEY}/{handler.__name__}",
            handler=handler,
            verb="admin",
            query=(_INTAKE,),
            answers={200: QueueSettings},
            problems=(409, 503),
        )
        for handler in (pause, resume)
    ),
)
