"""HTTP operations for failed jobs, which are the dead letters of all models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import msgspec
from starlette.responses import Response

from taskqueue_core import dead_letter_filter
from taskqueue_core.tasks import DeadLetter
from taskqueue_dispatch.api.models import LetterOut, LettersOut
from taskqueue_dispatch.handler_helpers import dispatcher_of, job_of, label_of, operation
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.status import mark_of_queue
from taskqueue_server.api.models import Count
from taskqueue_server.routing.operations import Query, RequestContext, answer, spliced
from taskqueue_server.routing.parameters import AFTER, LIMIT, link, page_query
from taskqueue_server.routing.schemas import LABEL

_QUEUES = 100
"""maximum number of queues that one call reads"""
_HEAVY = 1024 * 1024
"""total size in bytes of a page's payloads after which no further queue is read"""
_encoder = msgspec.json.Encoder()


async def failed(call: RequestContext) -> Response:
    """Return a page of failed jobs of the models that the token covers, grouped by model, from oldest to newest.

    To read the next page, send ``next`` as ``after``. The last page has no ``next``. Any other page may be short or
    even empty.
    """
    limit, after = page_query(call)
    keys = await _keys(call)
    dead_letters, following = await _page(call, keys, limit, after)
    answered = spliced(_array(call, dead_letters, following))
    answered.headers.update(link(call, following))
    return answered


async def _keys(call: RequestContext) -> list[str]:
    """Return the queues that the client may read, sorted by the prefix of their job ids."""
    if (model := label_of(call, "model")) is not None:
        call.demand(queue_of(model))
        return [queue_of(model)]
    return [key for key in await dispatcher_of(call).jobs.queues() if call.is_allowed(key)]


async def _page(
    call: RequestContext, keys: list[str], limit: int, after: str | None
) -> tuple[list[DeadLetter], str | None]:
    """Return a page and the next page's cursor: a position in a queue, or the job id prefix of a fully read queue."""
    position = None if after is None else after.rpartition(">")[2]
    start, inside, _ = ("", "", "") if position is None else position.partition("-")
    rest = [
        key
        for key in keys
        if mark_of_queue(key) > start or (inside and mark_of_queue(key) == start)
    ]
    conditions = dead_letter_filter.DeadLetterFilter.of(call.context.backend.now())
    matches: list[DeadLetter] = []
    size = 0
    for looked, key in enumerate(rest, 1):
        here = after if inside and mark_of_queue(key) == start else None
        dead_letters, following = await dead_letter_filter.page(
            call.context.dead_letters, key, conditions, limit=limit - len(matches), after=here
        )
        matches += dead_letters
        if following is not None:
            return matches, following
        size += sum(len(dead_letter.task.payload) for dead_letter in dead_letters)
        full = len(matches) == limit or size > _HEAVY or looked == _QUEUES
        if full and looked < len(rest):
            return matches, mark_of_queue(key)
    return matches, None


def _array(
    call: RequestContext, dead_letters: Iterable[DeadLetter], following: str | None
) -> Iterator[bytes]:
    jobs = dispatcher_of(call).jobs
    yield b'{"jobs":['
    comma = b""
    for dead_letter in dead_letters:
        yield comma + _encoder.encode(
            LetterOut.of(jobs.model_of(dead_letter.task.key), dead_letter)
        )
        comma = b","
    yield b"]}" if following is None else b'],"next":' + _encoder.encode(following) + b"}"


async def retry(call: RequestContext) -> Response:
    """Retry a failed job. The count is 0 if the job has not failed."""
    known = await job_of(call)
    count = await call.context.dead_letters.redrive(known.key, known.task_id)
    call.note("redrive", known.key, tasks=count, details=f"id={known.task_id}")
    return answer(Count(count))


async def retry_all(call: RequestContext) -> Response:
    """Retry all failed jobs of one model, or of all models that the token covers. Idempotent."""
    keys = await _keys(call)
    count = sum([await call.context.dead_letters.redrive(key) for key in keys])
    one = keys[0] if len(keys) == 1 else None
    call.note("redrive", one, tasks=count, details=" ".join(["queues:", *keys]))
    return answer(Count(count))


async def discard(call: RequestContext) -> Response:
    """Discard a failed job permanently. The count is 0 if the job has not failed."""
    known = await job_of(call)
    count = await call.context.dead_letters.discard(known.key, known.task_id)
    call.note("discard", known.key, tasks=count, details=f"id={known.task_id}")
    return answer(Count(count))


_MODEL = Query("model", LABEL, "only jobs of this model", example="zimg")
_operation = partial(operation, "letters", verb="admin", tag="failed jobs")
_ONE = {"answers": {200: Count}, "problems": (404, 503)}
OPERATIONS = (
    _operation(
        "GET",
        "/admin/dlq",
        failed,
        query=(_MODEL, LIMIT, AFTER),
        answers={200: LettersOut},
        response_headers=("Link",),
        problems=(503,),
    ),
    _operation(
        "POST",
        "/admin/dlq/retry-all",
        retry_all,
        query=(_MODEL,),
        answers={200: Count},
        problems=(503,),
    ),
    _operation("POST", "/admin/dlq/{job_id}/retry", retry, **_ONE),
    _operation("DELETE", "/admin/dlq/{job_id}", discard, **_ONE),
)
