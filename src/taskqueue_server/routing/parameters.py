"""Parameters that several operations share: ``Idempotency-Key`` and pagination."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from urllib.parse import urlencode

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.times import parse_time
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Query, RequestContext
from taskqueue_server.routing.schemas import NAME

_HEADER = "Idempotency-Key"
_VALUE = re.compile(r'"[ !#-\[\]-~]{1,200}"|[!#-\[\]-~]{1,200}')
IDEMPOTENCY_KEY = Query(
    _HEADER,
    {"type": "string", "pattern": f"^({_VALUE.pattern})$"},
    "for tasks without ids: repeated requests with the same value and the same token publish each task only once",
    example='"order-4711"',
)


def id_maker(call: RequestContext) -> Callable[[str, str | None, int], str | None]:
    """Return a function that derives a task's id from the request's ``Idempotency-Key``.

    The function takes the task's queue, its id in the request, and its line number. Without the header it returns
    ``None``. With the header it derives the id from the client, the header, the queue and the line number, and raises
    `InvalidInput` if the task already has an id. For an invalid header, `id_maker` itself raises `InvalidInput`.
    """
    values = call.request.headers.getlist(_HEADER)
    if not values:
        return lambda key, own, line: None  # noqa: ARG005 - same signature as `made`
    if len(values) > 1 or not _VALUE.fullmatch(values[0]):
        raise InvalidInput(
            _HEADER,
            f"text of length {len(values[0])}",
            "one value of 1 to 200 printable ASCII characters, in double quotes if it has spaces",
        )
    client = "" if call.identity is None else call.identity.name
    names = [client, values[0].removeprefix('"').removesuffix('"')]

    def made(key: str, own: str | None, line: int) -> str:
        if own is not None:
            raise InvalidInput("id", f"both an id and {_HEADER}", "only one of them")
        parts = "".join(f"{len(name)}:{name}" for name in (*names, key, str(line)))
        return "idem-" + hashlib.sha256(parts.encode()).hexdigest()[:40]

    return made


def reused() -> ProblemError:
    """Return the problem for an ``Idempotency-Key`` that was already used for a task with another payload."""
    detail = f"this {_HEADER} was already used with another payload"
    return ProblemError(422, "idempotency_key_reused", detail, field=_HEADER)


_PAGE = 100
LIMIT = Query(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": LIMITS.batch, "default": _PAGE},
    "maximum number of items on a page",
)
AFTER = Query("after", NAME, "the `next` of the previous page", example="emails")


def page_of(call: RequestContext, names: Iterable[str]) -> tuple[list[str], str | None]:
    """Return the requested page of the sorted names, and its last name if more names follow, otherwise ``None``."""
    limit, after = page_query(call)
    rest = [name for name in names if after is None or name > after]
    return rest[:limit], rest[limit - 1] if len(rest) > limit else None


def time_query(call: RequestContext, name: str) -> float | None:
    """Return a time from the query in Unix seconds, or ``None`` if it is absent. Raises `InvalidInput`."""
    text = call.request.query_params.get(name)
    return None if text is None else parse_time(name, text, call.context.backend.now())


def page_query(call: RequestContext) -> tuple[int, str | None]:
    """Return the page size, and the name after which the page starts, if one is given. Raises `InvalidInput`."""
    return call.number("limit", _PAGE, LIMITS.batch), call.query_name("after")


def link(call: RequestContext, following: str | None, **exact: object) -> dict[str, str]:
    """Return a ``Link`` header with the URL of the page after ``following``; no header if ``following`` is ``None``.

    ``exact`` are parameters whose text in the request means something else the next time, with what it meant.
    """
    if following is None:
        return {}
    others = {name: text for name, text in call.request.query_params.items() if name != "after"}
    query = urlencode({**others, **exact, "after": following})
    path = call.request.scope["raw_path"].decode("ascii", "replace")
    return {"link": f'<{path}?{query}>; rel="next"'}
