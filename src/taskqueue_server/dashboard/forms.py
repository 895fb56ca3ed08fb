"""What a form sends: text in fields, some of them several times."""

from __future__ import annotations

from urllib.parse import parse_qs

from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Call

__all__ = ["Form", "read_form"]

_FORM = "application/x-www-form-urlencoded"
_MAX_FIELDS = 2000


class Form:
    """The fields of a form."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        """Return one field without blanks around it; nothing where it is not there."""
        return self._fields.get(name, [""])[0].strip()

    def all(self, name: str) -> list[str]:
        """Return a field that may be there several times."""
        return self._fields.get(name, [])


async def read_form(call: Call) -> Form:
    """Read the body. Raises `ProblemError`."""
    body = await call.read(_FORM)
    try:
        fields = parse_qs(
            body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict"
        )
    except ValueError:
        raise ProblemError(400, "not_a_form", "the body must be the fields of a form") from None
    return Form(fields)
