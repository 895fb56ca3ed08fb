"""Dead letters: a page of them, redrive, discard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from starlette.responses import Response

from taskqueue_core.limits import LIMITS
from taskqueue_core.server.models import Count, DeadLetterOut, DeadLettersOut, Selection
from taskqueue_core.server.operations import Call, Operation, Query, answer, spliced
from taskqueue_core.tasks import DeadLetter

__all__ = ["OPERATIONS"]

_PAGE = 100
_encoder = msgspec.json.Encoder()


async def page(call: Call) -> Response:
    """Return dead letters, oldest first; ``after`` is the task id that ended the page before."""
    key = call.name("key")
    limit = call.number("limit", _PAGE, LIMITS.batch)
    found = await call.hub.dead_letters.list(key, limit=limit, after=call.word("after"))
    return spliced(_array(found))


async def redrive(call: Call) -> Response:
    """Make dead tasks waiting again. Ids that are not dead are passed over."""
    key = call.name("key")
    ids = (await call.body(Selection)).checked()
    return answer(Count(await call.hub.dead_letters.redrive(key, *ids)))


async def discard(call: Call) -> Response:
    """Give dead tasks up for good. Ids that are not dead are passed over."""
    key = call.name("key")
    ids = (await call.body(Selection)).checked()
    return answer(Count(await call.hub.dead_letters.discard(key, *ids)))


def _array(letters: Iterable[DeadLetter]) -> Iterator[bytes]:
    yield b'{"dead_letters":['
    comma = b""
    for letter in letters:
        yield comma + _encoder.encode(DeadLetterOut.of(letter))
        comma = b","
    yield b"]}"


_KEY = "/v1/queues/{key}/dead-letters"
OPERATIONS = (
    Operation(
        method="GET",
        path=_KEY,
        handler=page,
        verb="admin",
        query=(
            Query("limit", {"type": "integer", "minimum": 1, "maximum": LIMITS.batch}, "page size"),
            Query("after", {"type": "string"}, "the task id that ended the page before"),
        ),
        answers={200: DeadLettersOut},
        problems=(503,),
    ),
    Operation(
        method="POST",
        path=f"{_KEY}/redrive",
        handler=redrive,
        verb="admin",
        body=Selection,
        answers={200: Count},
        problems=(503,),
    ),
    Operation(
        method="POST",
        path=f"{_KEY}/discard",
        handler=discard,
        verb="admin",
        body=Selection,
        answers={200: Count},
        problems=(503,),
    ),
)
