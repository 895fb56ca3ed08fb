"""References to the results of steps of a workflow that have not run yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn


class Output:
    """A reference to the result of a step, which is not known yet, in the arguments of another step."""

    __slots__ = ("step",)

    def __init__(self, step: object) -> None:
        """Store the step whose result it is."""
        self.step = step

    def __repr__(self) -> str:
        return f"<output of {self.step!r}>"

    def _unknown(self, *_: object) -> NoReturn:
        raise TypeError(
            f"{self!r} is not known yet: pass it whole to the call of another step, which gets the result as argument"
        )

    __str__ = __bool__ = __iter__ = __len__ = __getitem__ = __format__ = _unknown


def outputs_in(*values: object) -> Iterator[Output]:
    """Yield the outputs in values: themselves, or in their lists, tuples and dicts at any depth."""
    pending: list[object] = [*values]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if isinstance(each, Output):
            yield each
        elif isinstance(each, list | tuple | dict) and id(each) not in seen:
            seen.add(id(each))
            pending += each.values() if isinstance(each, dict) else each


def has_outputs(*values: object) -> bool:
    """Return whether there are outputs in values."""
    return next(outputs_in(*values), None) is not None
