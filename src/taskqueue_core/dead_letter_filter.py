"""Listing, redriving and discarding dead letters that match a filter, in batches of limited size."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import msgspec

from taskqueue_core.capabilities import DeadLetters
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_duration, check_time, kind_of
from taskqueue_core.tasks import DeadLetter

_FIRST, _LARGEST = 100, 500
_LIGHT = 1024 * 1024
"""total size of a batch, in bytes, below which the next batch may have more dead letters"""
_LOOKED_AT = 10_000
"""maximum number of dead letters that one call reads"""
_PAGE_BYTES = 4 * 1024 * 1024
"""total size of a page, in bytes, above which the page ends"""
_CURSOR = re.compile(r"<([0-9.e+-]{1,30})(?::([0-9]{1,20}(?:[.][0-9]{1,20})?))?>(.+)")


class DeadLetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions for selecting dead letters. All conditions that are not ``None`` must hold."""

    reason: str | None
    """exact reason of the dead letter"""
    error: str | None
    """text that the last error must contain"""
    before: float | None
    """time before which the task must have become a dead letter, in Unix seconds"""
    made: float
    """time at which the filter was made; `act` skips newer dead letters: it may have redriven these tasks itself"""

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
        """Return a filter made at the time ``now``.

        Raises `InvalidInput` for an invalid value, or if both ``failed_before`` and ``older_than`` are given.
        """
        for field, text in (("reason", reason), ("error", error)):
            if text is not None and not 0 < len(text) <= LIMITS.text:
                raise InvalidInput(field, kind_of(text), f"text of 1 to {LIMITS.text} characters")
        if failed_before is not None:
            check_time("failed_before", failed_before)
        if older_than is None:
            return cls(reason=reason, error=error, before=failed_before, made=now)
        if failed_before is not None:
            raise InvalidInput(
                "older_than", "both older_than and failed_before", "only one of them"
            )
        check_duration("older_than", older_than)
        return cls(reason=reason, error=error, before=now - older_than, made=now)

    @property
    def lets_all_through(self) -> bool:
        """Whether the filter has no conditions, so that every dead letter matches."""
        return self.reason is None and self.error is None and self.before is None

    def __contains__(self, dead_letter: DeadLetter) -> bool:
        if self.reason is not None and dead_letter.reason != self.reason:
            return False
        if self.error is not None and not (
            dead_letter.history and self.error in dead_letter.history[-1].error
        ):
            return False
        return self.before is None or dead_letter.failed_at < self.before


class _Pieces:
    """Reads a list of dead letters in batches, which grow while the dead letters are small."""

    def __init__(self, dead_letters: DeadLetters, key: str) -> None:
        self._letters = dead_letters
        self._key = key
        self._size = _FIRST
        self._read = 0
        self.over = False
        """whether the call must end, because the maximum number of dead letters was read"""

    async def read(
        self, after: str | None, most: int = LIMITS.batch
    ) -> tuple[Sequence[DeadLetter], bool]:
        """Return the next batch, and whether more dead letters follow."""
        size = min(self._size, most, _LOOKED_AT - self._read)
        dead_letters = await self._letters.list(self._key, limit=size + 1, after=after)
        piece, more = dead_letters[:size], len(dead_letters) > size
        self._read += len(piece)
        self.over = self._read >= _LOOKED_AT
        light = sum(dead_letter.size for dead_letter in piece) < _LIGHT
        self._size = min(_LARGEST, 2 * self._size) if light else _FIRST
        # Let other coroutines run: calls to a store in this process never yield to the event loop.
        await asyncio.sleep(0)
        return piece, more


async def page(
    dead_letters: DeadLetters,
    key: str,
    dead_letter_filter: DeadLetterFilter,
    *,
    limit: int,
    after: str | None,
) -> tuple[list[DeadLetter], str | None]:
    """Return a page of the matching dead letters, and the position of the next page if there is one.

    A position contains the id of a task and, unless the position would be too long, the time at which the task became a
    dead letter. A position is invalid if the task is no longer a dead letter, or has become a dead letter again at
    another place in the list. An invalid position means the beginning of the list.
    """
    matches: list[DeadLetter] = []
    pieces, size = _Pieces(dead_letters, key), 0
    after, _ = await _resolved(dead_letters, key, after)
    last: DeadLetter | None = None
    while True:
        most = limit - len(matches) if dead_letter_filter.lets_all_through else LIMITS.batch
        piece, more = await pieces.read(after, most)
        for dead_letter in piece:
            last = dead_letter
            if dead_letter in dead_letter_filter:
                matches.append(dead_letter)
                size += dead_letter.size
            if len(matches) == limit or size > _PAGE_BYTES:
                ended = dead_letter is piece[-1] and not more
                return matches, None if ended else _cursor_of(dead_letter)
        if last is None or not more or pieces.over:
            return matches, _cursor_of(last) if last is not None and more else None
        after = last.task.id


async def act(
    dead_letters: DeadLetters,
    key: str,
    dead_letter_filter: DeadLetterFilter,
    verb: Callable[..., Awaitable[int]],
    *,
    after: str | None,
) -> tuple[int, str | None]:
    """Redrive or discard matching dead letters; return their number, and the position at which to continue.

    A position contains the time of the first call, so that later calls skip newer dead letters.
    """
    pieces, count = _Pieces(dead_letters, key), 0
    position = after
    after, began = await _resolved(dead_letters, key, position)
    made = dead_letter_filter.made if began is None else min(began, dead_letter_filter.made)
    following = position if after is not None else None
    while True:
        piece, more = await pieces.read(after)
        chosen = {
            dead_letter.task.id
            for dead_letter in piece
            if dead_letter in dead_letter_filter and dead_letter.failed_at <= made
        }
        if chosen:
            count += await verb(key, *chosen)
        if stay := [dead_letter for dead_letter in piece if dead_letter.task.id not in chosen]:
            after, following = stay[-1].task.id, _cursor_of(stay[-1], made)
        if not more:
            return count, None
        # If every dead letter was removed, return the position of a removed one, which means the beginning of the list.
        if pieces.over:
            return count, following or _cursor_of(piece[-1], made)


def _cursor_of(dead_letter: DeadLetter, made: float | None = None) -> str:
    mark = repr(dead_letter.failed_at) if made is None else f"{dead_letter.failed_at!r}:{made!r}"
    position = f"<{mark}>{dead_letter.task.id}"
    return position if len(position) <= LIMITS.name else dead_letter.task.id


async def _resolved(
    dead_letters: DeadLetters, key: str, position: str | None
) -> tuple[str | None, float | None]:
    if position is None or (match := _CURSOR.fullmatch(position)) is None:
        return position, None
    died, made, task_id = match.groups()
    dead_letter = await dead_letters.get(key, task_id)
    stays = dead_letter is not None and repr(dead_letter.failed_at) == died
    return task_id if stays else None, float(made) if made else None
