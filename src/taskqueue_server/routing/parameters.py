"""``Idempotency-Key``: the same request, sent again, is the same task, because both are given the same id."""

from __future__ import annotations

import hashlib
import re

from taskqueue_core.errors import InvalidInput
from taskqueue_server.routing.operations import Call, Query

__all__ = ["IDEMPOTENCY_KEY", "id_maker", "reused"]

from collections.abc import Callable

from taskqueue_server.problems import ProblemError

_HEADER = "Idempotency-Key"
_VALUE = re.compile(r'"[ !#-\[\]-~]{1,200}"|[!#-\[\]-~]{1,200}')
IDEMPOTENCY_KEY = Query(
    _HEADER,
    {"type": "string", "pattern": f"^({_VALUE.pattern})$"},
    "where the task has no id: the same key from the same token, sent again, stands for the same task",
    example='"order-4711"',
)


def id_maker(call: Call) -> Callable[[str, str | None, int], str | None]:
    """Return what gives the task of a queue, with its own id or none, on a line, its id; ``None`` for any.

    The id is one of the queue, of who asks, and of the header. Raises `InvalidInput` for a header that is none, and
    what it returns does for a task that has an id of its own beside the header.
    """
    told = call.request.headers.getlist(_HEADER)
    if not told:
        return lambda key, own, line: None  # noqa: ARG005 - of the same kind as the other
    if len(told) > 1 or not _VALUE.fullmatch(told[0]):
        raise InvalidInput(_HEADER, f"text of length {len(told[0])}", "1 to 200 ASCII characters")
    who = "" if call.identity is None else call.identity.name
    words = [who, told[0].removeprefix('"').removesuffix('"')]

    def made(key: str, own: str | None, line: int) -> str:
        if own is not None:
            raise InvalidInput("id", f"both an id and {_HEADER}", "one of them")
        parts = "".join(f"{len(word)}:{word}" for word in (*words, key, str(line)))
        return "idem-" + hashlib.sha256(parts.encode()).hexdigest()[:40]

    return made


def reused() -> ProblemError:
    """Return the problem of a header that stood for a task with another payload before."""
    detail = f"this {_HEADER} was sent before, with another payload"
    return ProblemError(422, "idempotency_key_reused", detail, field=_HEADER)
