"""Dead letters: list, look up, redrive, discard."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.responses import Response

from taskqueue_core import dead_letter_filter
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_server.api.models import Acted, Count, DeadLetterOut, DeadLettersOut, Selection
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import (
    Operation,
    Query,
    RequestContext,
    answer,
    joined,
    spliced,
)
from taskqueue_server.routing.parameters import AFTER, LIMIT, link, page_query
from taskqueue_server.routing.schemas import CENTURY, END_OF_TIME

_encoder = msgspec.json.Encoder()


async def page(call: RequestContext) -> Response:
    """List dead letters, oldest first, optionally filtered.

    Repeat the request with ``next`` as ``after`` until the response has no ``next``. A page may be short or empty
    although more pages follow, because only a limited number of dead letters is examined for each page. If the task
    that ``after`` names is no longer a dead letter, the list starts again from the beginning, so that redriving page by
    page misses no dead letter.
    """
    key = call.name("key")
    limit, after = page_query(call)
    conditions = dead_letter_filter.DeadLetterFilter.of(
        call.context.backend.now(),
        reason=call.text("reason"),
        error=call.text("error"),
        failed_before=call.real("failed_before", END_OF_TIME),
        older_than=call.real("older_than", CENTURY),
    )
    dead_letters, following = await dead_letter_filter.page(
        call.context.dead_letters, key, conditions, limit=limit, after=after
    )
    encoded = (_encoder.encode(DeadLetterOut.of(dead_letter)) for dead_letter in dead_letters)
    tail = b"]}" if following is None else b'],"next":' + _encoder.encode(following) + b"}"
    answered = spliced(joined(b'{"dead_letters":[', encoded, tail))
    answered.headers.update(link(call, following))
    return answered


async def get_dead_letter(call: RequestContext) -> Response:
    """Return one dead letter."""
    dead_letter = await call.context.dead_letters.get(call.name("key"), call.name("id"))
    if dead_letter is None:
        raise ProblemError(404, "no_dead_letter", "no dead letter with this id")
    return answer(DeadLetterOut.of(dead_letter))


async def redrive_one(call: RequestContext) -> Response:
    """Redrive one dead letter. The count is 0 if the task is not a dead letter."""
    return await _act_on_one(call, "redrive")


async def discard_one(call: RequestContext) -> Response:
    """Discard one dead letter permanently. The count is 0 if the task is not a dead letter."""
    return await _act_on_one(call, "discard")


async def _act_on_one(call: RequestContext, verb: str) -> Response:
    key, task_id = call.name("key"), call.name("id")
    count = await getattr(call.context.dead_letters, verb)(key, task_id)
    call.note(verb, key, tasks=count, details=f"id={task_id}")
    return answer(Count(count))


async def redrive(call: RequestContext) -> Response:
    """Redrive dead letters: those with the given ids, those that match a filter, or all. Idempotent.

    Ids of tasks that are not dead letters are skipped. With a filter, one request examines a limited number of dead
    letters: repeat it with ``next`` as ``after`` until the response has no ``next``. Tasks that became dead letters
    after the first of these requests are skipped.
    """
    return await _act(call, "redrive")


async def discard(call: RequestContext) -> Response:
    """Discard dead letters permanently: those with the given ids, those that match a filter, or all. Idempotent.

    With a filter or ``all``, ``confirm`` must be the queue's key. Ids, filter and ``next`` work as for redriving.
    """
    return await _act(call, "discard")


async def _act(call: RequestContext, verb: str) -> Response:
    key = call.name("key")
    chosen = await call.body(Selection)
    ids = chosen.checked()
    if verb == "discard" and not ids:
        call.confirm(key)
    dead_letters = call.context.dead_letters
    act = dead_letters.redrive if verb == "redrive" else dead_letters.discard
    if chosen.filter is None:
        count = await act(key, *ids)
        call.note(verb, key, tasks=count, details=" ".join(["ids:", *ids]) if ids else "all")
        return answer(Acted(count=count))
    fields = {name: getattr(chosen.filter, name) for name in chosen.filter.__struct_fields__}
    conditions = dead_letter_filter.DeadLetterFilter.of(call.context.backend.now(), **fields)
    if conditions.lets_all_through:
        raise InvalidInput("filter", "no condition", 'at least one condition, or "all": true')
    count, following = await dead_letter_filter.act(
        dead_letters, key, conditions, act, after=chosen.after
    )
    shown = [f"{name}={value}" for name, value in fields.items() if value is not None]
    call.note(verb, key, tasks=count, details=" ".join(shown))
    return answer(Acted(count=count, next=following))


_KEY = "/v1/queues/{key}/dead-letters"
_TEXT = {"type": "string", "minLength": 1, "maxLength": LIMITS.text}
_FILTER = (
    Query("reason", _TEXT, "only dead letters with exactly this reason", example="max_attempts"),
    Query(
        "error", _TEXT, "only dead letters whose last error contains this text", example="timeout"
    ),
    Query(
        "failed_before",
        {"type": "number", "minimum": 0, "maximum": END_OF_TIME},
        "only dead letters that failed before this time, in Unix seconds",
    ),
    Query(
        "older_than",
        {"type": "number", "minimum": 0, "maximum": CENTURY},
        "only dead letters that failed at least this many seconds ago",
        example=3600,
    ),
)
_CONFIRM = Query(
    "confirm",
    {"type": "string"},
    "the queue's key, to confirm; required unless ids are given",
)
_EXAMPLE = {"filter": {"error": "timeout", "older_than": 600}}
_operation = partial(Operation, tag="dead letters", verb="admin")
OPERATIONS = (
    _operation(
        "GET",
        _KEY,
        page,
        {200: DeadLettersOut},
        id="dead_letters_page",
        query=(LIMIT, AFTER, *_FILTER),
        response_headers=("Link",),
    ),
    _operation(
        "POST",
        f"{_KEY}/redrive",
        redrive,
        {200: Acted},
        id="dead_letters_redrive",
        body=Selection,
        example=_EXAMPLE,
    ),
    _operation(
        "POST",
        f"{_KEY}/discard",
        discard,
        {200: Acted},
        id="dead_letters_discard",
        query=(_CONFIRM,),
        body=Selection,
        example={"ids": ["order-4711"]},
    ),
    _operation(
        "GET",
        _KEY + "/{id}",
        get_dead_letter,
        {200: DeadLetterOut},
        id="dead_letters_one",
        problems=(404,),
    ),
    _operation(
        "POST", _KEY + "/{id}/redrive", redrive_one, {200: Count}, id="dead_letters_redrive_one"
    ),
    _operation("DELETE", _KEY + "/{id}", discard_one, {200: Count}, id="dead_letters_discard_one"),
)
