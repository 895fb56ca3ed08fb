"""Many look-ups in one request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.responses import Response

from taskqueue_server.api.models import Ids, StatusesOut
from taskqueue_server.routing.operations import Call, Operation, answer, spliced

__all__ = ["LOOKUPS"]


async def statuses(call: Call) -> Response:
    """Say what is known of tasks; null for unknown and forgotten ones."""
    key = call.name("key")
    ids = (await call.body(Ids)).checked()
    found = await call.hub.control.statuses(key, *ids) if ids else ()
    return answer(StatusesOut(dict(zip(ids, found, strict=True))))


async def results(call: Call) -> Response:
    """Return results by id, as the workers wrote them; ids without one are absent."""
    key = call.name("key")
    ids = (await call.body(Ids)).checked()
    found = await call.hub.control.results(key, *ids) if ids else ()
    return spliced(_object(zip(ids, found, strict=True)))


def _object(pairs: Iterator[tuple[str, bytes | None]]) -> Iterator[bytes]:
    yield b'{"results":{'
    comma = b""
    for task_id, text in pairs:
        if text is not None:
            yield comma + msgspec.json.encode(task_id) + b":" + text
            comma = b","
    yield b"}}"


LOOKUPS = (
    Operation(
        id="lookups_statuses",
        method="POST",
        path="/v1/queues/{key}/statuses",
        handler=statuses,
        verb=("publish", "admin"),
        body=Ids,
        answers={200: StatusesOut},
        problems=(503,),
        tag="tasks",
        example={"ids": ["order-4711"]},
    ),
    Operation(
        id="lookups_results",
        method="POST",
        path="/v1/queues/{key}/results",
        handler=results,
        verb=("publish", "admin"),
        body=Ids,
        answers={200: dict[str, dict[str, Any]]},
        problems=(503,),
        tag="tasks",
        example={"ids": ["order-4711"]},
    ),
)
