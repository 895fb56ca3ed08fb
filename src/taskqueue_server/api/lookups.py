"""Statuses and results of many tasks of a queue, by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from taskqueue_core.errors import TooLarge
from taskqueue_core.limits import LIMITS
from taskqueue_server.api.models import Ids, StatusesOut, checked_ids
from taskqueue_server.api.rights import LOOKING_UP, READING
from taskqueue_server.routing.bodies import JSON
from taskqueue_server.routing.operations import Operation, RequestContext, joined, spliced

_RESULTS = LIMITS.body // LIMITS.result
"""number of results that are read at once"""
_operation = partial(Operation, tag="tasks", verb=READING)


async def statuses(call: RequestContext) -> Response:
    """Return the statuses of tasks; null for unknown tasks.

    If the statuses are larger than the limit ``body`` in total, the response is 413: repeat with fewer ids.
    """
    key = call.name("key")
    ids = checked_ids((await call.body(Ids)).ids)
    found = await call.context.control.statuses(key, *ids) if ids else ()
    text = msgspec.json.encode(StatusesOut(dict(zip(ids, found, strict=True))))
    _check_total("statuses", ids, len(text))
    return Response(text, media_type=JSON)


def _check_total(what: str, ids: Sequence[str], size: int) -> None:
    if size > LIMITS.body:
        allowed = f"ids whose {what} have at most {LIMITS.body} bytes in total (limit body)"
        raise TooLarge("ids", f"{len(ids)} ids", allowed)


async def results(call: RequestContext) -> Response:
    """Return results by id, as the workers returned them; ids without a result are omitted.

    If the results are larger than the limit ``body`` in total, the response is 413: repeat with fewer ids.
    """
    key = call.name("key")
    ids = checked_ids((await call.body(Ids)).ids)
    found: dict[str, bytes] = {}
    size = 0
    for start in range(0, len(ids), _RESULTS):
        piece = ids[start : start + _RESULTS]
        texts = await call.context.control.results(key, *piece)
        found |= {i: text for i, text in zip(piece, texts, strict=True) if text is not None}
        size += sum(len(text or b"") for text in texts)
        _check_total("results", ids, size)
    members = (msgspec.json.encode(i) + b":" + text for i, text in found.items())
    return spliced(joined(b'{"results":{', members, b"}}"))


OPERATIONS = (
    _operation(
        "POST",
        "/v1/queues/{key}/statuses",
        statuses,
        {200: StatusesOut},
        id="lookups_statuses",
        verb=LOOKING_UP,
        body=Ids,
        example={"ids": ["order-4711"]},
    ),
    _operation(
        "POST",
        "/v1/queues/{key}/results",
        results,
        {200: dict[str, dict[str, Any]]},
        id="lookups_results",
        body=Ids,
        problems=(413,),
        example={"ids": ["order-4711"]},
    ),
)
