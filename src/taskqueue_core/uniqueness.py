"""Unique keys: a queue has at most one live task with such a key, whatever the ids of the tasks are."""

from __future__ import annotations

from typing import Literal

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_duration, check_name, kind_of

__all__ = ["Debounce", "OnConflict", "UniqueKey", "Until"]

Until = Literal["ended", "started"]
OnConflict = Literal["keep", "replace", "refuse"]
_UNTIL, _ON_CONFLICT = ("ended", "started"), ("keep", "replace", "refuse")


class Debounce(msgspec.Struct, frozen=True):
    """Each publish with the same unique key replaces the one before, and puts the task off again.

    Raises `InvalidInput`.

    >>> debounce = Debounce(seconds=30, max_wait=300)
    """

    seconds: float
    """seconds from the last publish until the task is due"""
    max_wait: float | None = None
    """maximum number of seconds from the first publish until the task is due; ``None`` means no limit"""

    def __post_init__(self) -> None:
        _check_positive("debounce.seconds", self.seconds)
        if self.max_wait is not None:
            _check_positive("debounce.max_wait", self.max_wait)
            if self.max_wait < self.seconds:
                raise InvalidInput(
                    "debounce.max_wait", "less than seconds", "seconds, or a larger number"
                )


class UniqueKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key that at most one task of a queue holds. Raises `InvalidInput`.

    The task that is stored first holds the key while it is live: scheduled, waiting or in flight. A dead letter holds
    nothing. The store decides in the step of the publish, after it has looked for the id.

    >>> unique = UniqueKey(key="rebuild-7", on_conflict="replace")
    """

    key: str
    """the key, by the rule of names; publishers derive it from what makes two tasks the same work"""
    until: Until = "ended"
    """when the task gives the key back: when it has ended, or already when it is delivered for the first time"""
    period: float | None = None
    """seconds from the publish during which the task holds the key in any case, even after its end"""
    on_conflict: OnConflict = "keep"
    """what a publish does whose key is held

    ``keep``: it stores nothing, and the answer is ``duplicate``. ``refuse``: it is refused with ``not_unique``.
    ``replace``: if the holder was never delivered, it gets the contents and the time of the new task; if it was, and
    it is not in its period, the new task is stored as well.
    """
    debounce: Debounce | None = None
    """the time of the task, by the store's clock; needs ``replace``"""

    def __post_init__(self) -> None:
        check_name("unique.key", self.key)
        _check_choice("unique.until", self.until, _UNTIL)
        _check_choice("unique.on_conflict", self.on_conflict, _ON_CONFLICT)
        if self.period is not None:
            _check_positive("unique.period", self.period)
        if self.debounce is None:
            return
        if not isinstance(self.debounce, Debounce):
            raise InvalidInput("debounce", kind_of(self.debounce), "a Debounce, or None")
        if self.on_conflict != "replace":
            got = f"a debounce with on_conflict {self.on_conflict!r}"
            raise InvalidInput("debounce", got, "a debounce with on_conflict 'replace'")

    def due_at(self, not_before: float | None, now: float, first: float) -> float | None:
        """Return when a task is due that is published now: ``not_before``, unless the key has a debounce.

        ``first``: the time of the first publish, which counts for ``max_wait``.
        """
        if self.debounce is None:
            return not_before
        at = now + self.debounce.seconds
        return at if self.debounce.max_wait is None else min(at, first + self.debounce.max_wait)


def check_unique(unique: object, not_before: float | None, ordering_key: str | None) -> None:
    """Check that a task with this unique key may have the other fields. Raises `InvalidInput`."""
    if not isinstance(unique, UniqueKey):
        raise InvalidInput("unique", kind_of(unique), "a UniqueKey, or None")
    if unique.debounce is None:
        return
    if not_before is not None:
        raise InvalidInput(
            "debounce", "a debounce and a time (delay or not_before)", "only one of them"
        )
    if ordering_key is not None:
        raise InvalidInput(
            "debounce",
            "a debounce and an ordering key, whose order it would change",
            "only one of them",
        )


def _check_positive(field: str, value: object) -> None:
    check_duration(field, value)
    if not value:
        raise InvalidInput(field, "0", "a number of seconds above 0")


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(field, kind_of(value), " or ".join(repr(each) for each in allowed))
