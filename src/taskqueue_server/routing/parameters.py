"""``Idempotency-Key``: the same request, sent again, is the same task, because both are given the same id."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import urlencode

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Query, RequestContext
from taskqueue_server.routing.schemas import NAME

_HEADER = "Idempotency-Key"
_VALUE = re.compile(r'"[ !#-\[\]-~]{1,200}"|[!#-\[\]-~]{1,200}')
IDEMPOTENCY_KEY = Query(
    _HEADER,
    {"type": "string", "pattern": f"^({_VALUE.pattern})$"},
    "where the task has no id: the same key from the same token, sent again, stands for the same task",
    example='"order-4711"',
)


def id_maker(call: RequestContext) -> Callable[[str, str | None, int], str | None]:
    """Return what gives the task of a queue, with its own id or none, on a line, its id; ``None`` for any.

    The id is one of the queue, of who asks, and of the header. Raises `InvalidInput` for a header that is none, and
    what it returns does for a task that has an id of its own beside the header.
    """
    results = call.request.headers.getlist(_HEADER)
    if not results:
        return lambda key, own, line: None  # noqa: ARG005 - of the same kind as the other
    if len(results) > 1 or not _VALUE.fullmatch(results[0]):
        raise InvalidInput(
            _HEADER, f"text of length {len(results[0])}", "1 to 200 ASCII characters"
        )
    client = "" if call.identity is None else call.identity.name
    names = [client, results[0].removeprefix('"').removesuffix('"')]

    def made(key: str, own: str | None, line: int) -> str:
        if own is not None:
            raise InvalidInput("id", f"both an id and {_HEADER}", "one of them")
        parts = "".join(f"{len(name)}:{name}" for name in (*names, key, str(line)))
        return "idem-" + hashlib.sha256(parts.encode()).hexdigest()[:40]

    return made


def reused() -> ProblemError:
    """Return the problem of a header that stood for a task with another payload before."""
    detail = f"this {_HEADER} was used before with another payload"
    return ProblemError(422, "idempotency_key_reused", detail, field=_HEADER)


_PAGE = 100
LIMIT = Query(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": LIMITS.batch, "default": _PAGE},
    "how many there are on a page at the most",
)
AFTER = Query("after", NAME, "where the page before said `next`", example="emails")


def page_of(call: RequestContext, names: Iterable[str]) -> tuple[list[str], str | None]:
    """Return the page of sorted names that the query asks for, and the last of them if there are more."""
    limit, after = page_query(call)
    rest = [name for name in names if after is None or name > after]
    return rest[:limit], rest[limit - 1] if len(rest) > limit else None


def page_query(call: RequestContext) -> tuple[int, str | None]:
    """Return how many the query asks for, and after which one. Raises `InvalidInput`."""
    return call.number("limit", _PAGE, LIMITS.batch), call.query_name("after")


def link(call: RequestContext, following: str | None) -> dict[str, str]:
    """Return the header that says where the next page is, if there is one."""
    if following is None:
        return {}
    requested = call.request.query_params
    names: Sequence[tuple[str, str]] = [*((n, v) for n, v in requested.items() if n != "after")]
    query = urlencode([*names, ("after", following)])
    path = call.request.scope["raw_path"].decode("ascii", "replace")
    return {"link": f'<{path}?{query}>; rel="next"'}
