"""What requests and answers about dead letters look like."""

from __future__ import annotations

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_name
from taskqueue_core.protocol.frames import WireTask, to_wire_task
from taskqueue_core.tasks import DeadLetter, Failure
from taskqueue_server.api.models import IdList, checked_ids
from taskqueue_server.routing.schemas import Instant, Name, Seconds, Text

__all__ = ["Acted", "DeadLetterOut", "DeadLettersOut", "LetterFilter", "Selection"]


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dead letters for which all of this holds. At least one thing must be said."""

    reason: Text | None = None
    """is the reason, word for word"""
    error: Text | None = None
    """stands in the last error"""
    failed_before: Instant | None = None
    """Unix seconds"""
    older_than: Seconds | None = None
    """failed so many seconds ago, or more"""


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some dead letters: those with these ids, or those that a filter finds, or all.

    Nothing stands for all but saying so. ``after`` goes with a filter: where the answer before said ``next``.
    """

    ids: IdList | None = None
    all: bool = False
    filter: LetterFilter | None = None
    after: Name | None = None

    def checked(self) -> tuple[str, ...]:
        """Return the ids; none means all, or those of the filter. Raises `InvalidInput`."""
        ways = sum((self.all, self.ids is not None, self.filter is not None))
        if ways > 1:
            raise InvalidInput("all", "more than one of all, ids and filter", "one of them")
        if self.after is not None:
            check_name("after", self.after)
            if self.filter is None:
                raise InvalidInput("after", "a place to go on from", "with a filter only")
        if self.all or self.filter is not None:
            return ()
        if not self.ids:
            raise InvalidInput("ids", "no ids", 'at least one id, or a filter, or "all": true')
        return checked_ids(self.ids)


class Acted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many dead letters moved. With ``next`` there are more to look at: ask again, with it as ``after``."""

    count: int
    next: str | None = None


class DeadLetterOut(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was given up."""

    task: WireTask
    attempt: int
    losses: int
    reason: str
    failed_at: float
    history: tuple[Failure, ...]

    @classmethod
    def of(cls, letter: DeadLetter) -> DeadLetterOut:
        """Share the payload's bytes."""
        return cls(
            task=to_wire_task(letter.task),
            attempt=letter.attempt,
            losses=letter.losses,
            reason=letter.reason,
            failed_at=letter.failed_at,
            history=letter.history,
        )


class DeadLettersOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of dead letters, oldest first. With ``next`` there are more, though the page may be short, or empty."""

    dead_letters: list[DeadLetterOut]
    next: str | None = None
