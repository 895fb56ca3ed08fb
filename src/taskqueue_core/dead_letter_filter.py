"""Going through dead letters with a filter: so many in one call, in pieces that fit into memory, and never twice."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import msgspec

from taskqueue_core.capabilities import DeadLetters
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_duration, check_time, kind_of
from taskqueue_core.tasks import DeadLetter

__all__ = ["Sieve", "act", "act_on_all", "page"]

Letters = Sequence[DeadLetter]
_FIRST, _LARGEST = 100, 500
_LIGHT = 1024 * 1024
"""payloads of a piece after which the next one may be larger"""
_LOOKED_AT = 10_000
"""letters of one call with a filter"""
_PAGE_BYTES = 4 * 1024 * 1024
"""payloads of one page; the last one may be over it"""
_PLACE = re.compile(r"<([0-9.e+-]{1,30})(?::([0-9.]{1,30}))?>(.+)")


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


class _Pieces:
    """Reads a list piece by piece: first a small one, then larger ones as long as they have little to carry."""

    def __init__(self, letters: DeadLetters, key: str) -> None:
        self._letters = letters
        self._key = key
        self._size = _FIRST
        self._read = 0

    @property
    def over(self) -> bool:
        """Whether so many were looked at that the call ends."""
        return self._read >= _LOOKED_AT

    async def read(self, after: str | None, most: int = LIMITS.batch) -> tuple[Letters, bool]:
        """Return a piece, and whether there are more behind it."""
        size = min(self._size, most, _LOOKED_AT - self._read)
        told = await self._letters.list(self._key, limit=size + 1, after=after)
        piece, more = told[:size], len(told) > size
        self._read += len(piece)
        light = sum(len(one.task.payload) for one in piece) < _LIGHT
        self._size = min(_LARGEST, 2 * self._size) if light else _FIRST
        await asyncio.sleep(0)  # a store within the process answers at once: others have their turn
        return piece, more


async def page(
    letters: DeadLetters, key: str, sieve: Sieve, *, limit: int, after: str | None
) -> tuple[list[DeadLetter], str | None]:
    """Return a page of what the sieve lets through, and the place where it goes on, if it does.

    A place is a task's id, with the time of its death as long as there is room: who died again since then is somewhere
    else in the list, and is no place any more. What is none stands for the beginning.
    """
    found: list[DeadLetter] = []
    pieces, size = _Pieces(letters, key), 0
    after, _ = await _resolved(letters, key, after)
    last: DeadLetter | None = None
    while True:
        most = limit - len(found) if sieve.lets_all_through else LIMITS.batch
        piece, more = await pieces.read(after, most)
        for letter in piece:
            last = letter
            if letter in sieve:
                found.append(letter)
                size += len(letter.task.payload)
            if len(found) == limit or size > _PAGE_BYTES:
                return found, _place(letter) if more or letter is not piece[-1] else None
        if last is None or not more or pieces.over:
            return found, _place(last) if last is not None and more else None
        after = last.task.id


async def act(
    letters: DeadLetters,
    key: str,
    sieve: Sieve,
    verb: Callable[..., Awaitable[int]],
    *,
    after: str | None,
) -> tuple[int, str | None]:
    """Do something that ends a dead letter to those that the sieve lets through; return how many, and where to go on.

    Where to go on is a letter that stays, and when the first of these calls was made: none touches what failed later.
    """
    pieces, count = _Pieces(letters, key), 0
    place = after
    after, began = await _resolved(letters, key, place)
    made = sieve.made if began is None else min(began, sieve.made)
    following = place if after is not None else None
    while True:
        piece, more = await pieces.read(after)
        chosen = {one.task.id for one in piece if one in sieve and one.failed_at <= made}
        if chosen:
            count += await verb(key, *chosen)
        if stay := [one for one in piece if one.task.id not in chosen]:
            after, following = stay[-1].task.id, _place(stay[-1], made)
        if not more:
            return count, None
        if pieces.over:  # where none stays, one that went stands for the beginning
            return count, following or _place(piece[-1], made)


def _place(letter: DeadLetter, made: float | None = None) -> str:
    mark = repr(letter.failed_at) if made is None else f"{letter.failed_at!r}:{made!r}"
    place = f"<{mark}>{letter.task.id}"
    return place if len(place) <= LIMITS.name else letter.task.id


async def _resolved(
    letters: DeadLetters, key: str, place: str | None
) -> tuple[str | None, float | None]:
    """Return after which letter to go on, ``None`` for the beginning, and when the first call was made."""
    if place is None or (found := _PLACE.fullmatch(place)) is None:
        return place, None
    died, made, task_id = found.groups()
    letter = await letters.get(key, task_id)
    stays = letter is not None and repr(letter.failed_at) == died
    return task_id if stays else None, _number(made)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


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
