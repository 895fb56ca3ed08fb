"""Queues: figures, settings, purge."""

from __future__ import annotations

from pydantic import ValidationError
from starlette.responses import Response

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.server import bodies
from taskqueue_core.server.models import Count, LedgerOut, QueuesOut
from taskqueue_core.server.operations import Call, Operation, answer
from taskqueue_core.server.problems import ProblemError
from taskqueue_core.tasks import QueueStats

__all__ = ["OPERATIONS"]


async def queues(call: Call) -> Response:
    """Return all queues at a glance."""
    control = call.hub.control
    return answer(QueuesOut([await control.stats(key) for key in await control.queues()]))


async def queue(call: Call) -> Response:
    """Return one queue at a glance; an unknown one is empty."""
    return answer(await call.hub.control.stats(call.name("key")))


async def ledger(call: Call) -> Response:
    """Return one queue's ledger, read in one step."""
    return answer(LedgerOut.of(await call.hub.control.ledger(call.name("key"))))


async def total(call: Call) -> Response:
    """Return the sum of all ledgers."""
    return answer(LedgerOut.of(await call.hub.queue.ledger()))


async def settings(call: Call) -> Response:
    """Return the settings in force."""
    return _settings(await call.hub.control.settings(call.name("key")))


async def configure(call: Call) -> Response:
    """Replace the settings; ``version`` must be the one in force. They act on the next call."""
    key = call.name("key")
    wanted = _decode(await bodies.read(call.request))
    return _settings(await call.hub.control.configure(key, wanted))


async def purge(call: Call) -> Response:
    """Cancel all waiting and scheduled tasks; what runs is left alone."""
    return answer(Count(await call.hub.control.purge(call.name("key"))))


def _settings(found: QueueSettings) -> Response:
    return Response(found.model_dump_json(), media_type=bodies.JSON)


def _decode(body: bytes) -> QueueSettings:
    try:
        return QueueSettings.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False, include_context=False)[0]
        if fault["type"] == "json_invalid":
            raise ProblemError(400, "not_json", "the body must be one JSON text") from None
        known = fault["type"] != "extra_forbidden"
        field = ".".join(str(part) for part in fault["loc"]) if known else None
        raise ProblemError(422, "invalid_input", fault["msg"], field=field) from None


_KEY = "/v1/queues/{key}"
OPERATIONS = (
    Operation(
        method="GET",
        path="/v1/queues",
        handler=queues,
        verb="admin",
        answers={200: QueuesOut},
        problems=(503,),
    ),
    Operation(
        method="GET",
        path=_KEY,
        handler=queue,
        verb="admin",
        answers={200: QueueStats},
        problems=(503,),
    ),
    Operation(
        method="GET",
        path=f"{_KEY}/ledger",
        handler=ledger,
        verb="admin",
        answers={200: LedgerOut},
        problems=(503,),
    ),
    Operation(
        method="GET",
        path="/v1/ledger",
        handler=total,
        verb="admin",
        answers={200: LedgerOut},
        problems=(503,),
    ),
    Operation(
        method="GET",
        path=f"{_KEY}/settings",
        handler=settings,
        verb="admin",
        answers={200: QueueSettings},
        problems=(503,),
    ),
    Operation(
        method="PUT",
        path=f"{_KEY}/settings",
        handler=configure,
        verb="admin",
        body=QueueSettings,
        answers={200: QueueSettings},
        problems=(409, 503),
    ),
    Operation(
        method="POST",
        path=f"{_KEY}/purge",
        handler=purge,
        verb="admin",
        answers={200: Count},
        problems=(503,),
    ),
)
