"""References to the results of parents in payloads: ``{"$input": 0}`` is the first result that is delivered."""

from __future__ import annotations

import re
from collections.abc import Sequence

from taskqueue_core.errors import InvalidInput

__all__ = ["count_references", "input_reference", "with_inputs"]

NAME = "$input"
_SPACE = rb"[ \t\r\n]*"
# The text cannot be part of a JSON string, in which its quotation marks would be escaped.
_REFERENCE = re.compile(
    rb"\{" + _SPACE + rb'"\$input"' + _SPACE + rb":" + _SPACE + rb"([0-9]{1,4})" + _SPACE + rb"\}"
)


def input_reference(number: int) -> dict[str, int]:
    """Return the reference to the result with this number, beginning with 0."""
    return {NAME: number}


def count_references(payload: bytes) -> int:
    """Return the number of references in a payload."""
    return len(_REFERENCE.findall(payload))


def with_inputs(payload: bytes, inputs: Sequence[bytes | None]) -> bytes:
    """Return a payload with the results in place of the references; a missing result is ``null``.

    Raises `InvalidInput` for a reference to a result that is not delivered.

    >>> with_inputs(b'{"width": {"$input": 0}}', [b"320"])
    b'{"width": 320}'
    """

    def result(found: re.Match[bytes]) -> bytes:
        number = int(found[1])
        if number >= len(inputs):
            raise InvalidInput(
                "payload",
                f"a reference to input {number}",
                f"references to the {len(inputs)} delivered inputs",
            )
        text = inputs[number]
        return b"null" if text is None else bytes(text)

    return _REFERENCE.sub(result, payload)
