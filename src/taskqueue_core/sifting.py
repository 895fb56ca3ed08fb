"""Going through dead letters with a filter: so many in one call, in pieces that fit into memory, and never twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Self

import msgspec

from taskqueue_core.capabilities import DeadLetters
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_duration, check_time, kind_of
from taskqueue_core.tasks import DeadLetter

__all__ = ["Sieve", "act", "act_on_all", "page"]

_PIECE = 100
_LOOKED_AT = 10_000
"""letters of one call with a filter"""
_PAGE_BYTES = 4 * 1024 * 1024
"""payloads of one page; the last one may be over it"""


class Sieve(msgspec.Struct, frozen=True, kw_only=True):
    """What lets dead letters through."""

    reason: str | None
    error: str | None
    before: float | None
    made: float
    """what failed after that is let be: it may have been redriven by the same sieve"""

    @classmethod
    def of(
        cls,
        now: float,
        *,
        reason: str | None = None,
        error: str | None = None,
        failed_before: float | None = None,
        older_than: float | None = None,
    ) -> Self:
        """Make one at the time ``now``. Raises `InvalidInput`, for one where both times are given."""
        for field, text in (("reason", reason), ("error", error)):
            if text is not None and not 0 < len(text) <= LIMITS.text:
                raise InvalidInput(field, kind_of(text), f"text of 1 to {LIMITS.text} characters")
        if failed_before is not None:
            check_time("failed_before", failed_before)
        if older_than is None:
            return cls(reason=reason, error=error, before=failed_before, made=now)
        if failed_before is not None:
            raise InvalidInput("older_than", "both older_than and failed_before", "one of them")
        check_duration("older_than", older_than)
        return cls(reason=reason, error=error, before=now - older_than, made=now)

    @property
    def lets_all_through(self) -> bool:
        """Whether nothing was asked for."""
        return self.reason is None and self.error is None and self.before is None

    def __contains__(self, letter: DeadLetter) -> bool:
        if self.reason is not None and letter.reason != self.reason:
            return False
        if self.error is not None and not (
            letter.history and self.error in letter.history[-1].error
        ):
            return False
        return self.before is None or letter.failed_at < self.before


async def page(
    letters: DeadLetters, key: str, sieve: Sieve, *, limit: int, after: str | None
) -> tuple[list[DeadLetter], str | None]:
    """Return a page of what the sieve lets through, and after which letter it goes on, if it does."""
    found: list[DeadLetter] = []
    size = looked_at = 0
    while True:
        # One more than is looked at tells whether there are more.
        piece = min(_PIECE, limit - len(found)) if sieve.lets_all_through else _PIECE
        told = await letters.list(key, limit=piece + 1, after=after)
        for place, letter in enumerate(told[:piece]):
            after = letter.task.id
            looked_at += 1
            if letter in sieve:
                found.append(letter)
                size += len(letter.task.payload)
            if len(found) == limit or size > _PAGE_BYTES or looked_at == _LOOKED_AT:
                return found, after if place + 1 < len(told) else None
        if len(told) <= piece:
            return found, None


async def act(
    letters: DeadLetters,
    key: str,
    sieve: Sieve,
    verb: Callable[..., Awaitable[int]],
    *,
    after: str | None,
) -> tuple[int, str | None]:
    """Do something that ends a dead letter to those that the sieve lets through; return how many, and where to go on.

    Where to go on is a letter that stays: one that is dead no more would be no place in the list.
    """
    count = looked_at = 0
    while True:
        told = await letters.list(key, limit=_PIECE, after=after)
        chosen = {one.task.id for one in told if one in sieve and one.failed_at <= sieve.made}
        if chosen:
            count += await verb(key, *chosen)
        after = next((one.task.id for one in reversed(told) if one.task.id not in chosen), after)
        looked_at += len(told)
        if len(told) < _PIECE:
            return count, None
        if looked_at >= _LOOKED_AT:
            # One that is not dead any more stands for the beginning.
            return count, after if after is not None else told[-1].task.id


async def act_on_all(
    letters: DeadLetters, verb: str, key: str, now: float, **conditions: Any
) -> int:
    """Redrive or discard, as ``verb`` says, all that the conditions of `Sieve.of` let through; return how many.

    A backend elsewhere sifts by itself.
    """
    if sift := getattr(letters, "sift", None):
        told: int = await sift(verb, key, now, **conditions)
        return told
    sieve, count, after = Sieve.of(now, **conditions), 0, None
    while True:
        some, after = await act(letters, key, sieve, getattr(letters, verb), after=after)
        count += some
        if after is None:
            return count
