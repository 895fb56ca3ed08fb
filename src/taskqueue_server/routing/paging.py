"""Pages of what may be much: how many, after which one, and where it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import urlencode

from taskqueue_core.limits import LIMITS
from taskqueue_server.routing.operations import Call, Query
from taskqueue_server.routing.schemas import NAME

__all__ = ["AFTER", "LIMIT", "asked", "link", "page_of"]

_PAGE = 100
LIMIT = Query(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": LIMITS.batch, "default": _PAGE},
    "how many there are on a page at the most",
)
AFTER = Query("after", NAME, "where the page before said `next`", example="emails")


def page_of(call: Call, names: Iterable[str]) -> tuple[list[str], str | None]:
    """Return the page of sorted names that the query asks for, and the last of them if there are more."""
    limit, after = asked(call)
    rest = [name for name in names if after is None or name > after]
    return rest[:limit], rest[limit - 1] if len(rest) > limit else None


def asked(call: Call) -> tuple[int, str | None]:
    """Return how many the query asks for, and after which one. Raises `InvalidInput`."""
    return call.number("limit", _PAGE, LIMITS.batch), call.word("after")


def link(call: Call, following: str | None) -> dict[str, str]:
    """Return the header that says where the next page is, if there is one."""
    if following is None:
        return {}
    asked = call.request.query_params
    words: Sequence[tuple[str, str]] = [*((n, v) for n, v in asked.items() if n != "after")]
    query = urlencode([*words, ("after", following)])
    path = call.request.scope["raw_path"].decode("ascii", "replace")
    return {"link": f'<{path}?{query}>; rel="next"'}
