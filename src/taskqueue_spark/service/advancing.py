"""What is known after a batch, from what was known before and what the batch has. Plain Python: no Spark, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from taskqueue_spark.service.balance import resolve
from taskqueue_spark.service.folding import Count, Read
from taskqueue_spark.service.state import ENDS, Books, Gap, Position, State, Window

__all__ = ["Alive", "advance", "note_positions", "without_old_windows"]

_HOUR = 3600
_GAPS = 100
"""breaks that are remembered"""
_FIRST = ("published", "configured")
"""what a queue begins with that has its journal from the first task on"""


class Alive(msgspec.Struct, frozen=True):
    """How many tasks of a queue are in a state; ``here`` tells those apart whose store began anew since."""

    key: str
    state: str
    here: bool
    number: int


def note_positions(state: State, read: Sequence[Read]) -> bool:
    """Note how far each count was read; return whether anything is missing."""
    cut = False
    for one in read:
        place = f"{one.run}/{one.shard}"
        known = state.positions.get(place)
        former = any(other.endswith(f"/{one.shard}") for other in state.positions)
        lacking = _lacking(one, known)
        cut |= lacking > 0
        # What was cut off before anybody read it is nothing that happened now.
        if lacking and former:
            expected = known.last + 1 if known else 1
            gap = Gap(
                kind="missing", shard=one.shard, run=one.run, first=min(expected, one.first), last=one.last,
                number=lacking, at=one.since,
            )  # fmt: skip
            state.gaps.append(gap)
        state.positions[place] = Position(
            last=max(one.last, known.last if known else 0),
            missing=lacking + (known.missing if known else 0),
            since=min(one.since, known.since if known else one.since),
            until=max(one.until, known.until if known else one.until),
        )
        state.frontier = max(state.frontier, one.until)
    return cut


def advance(
    state: State,
    *,
    counts: Iterable[Count],
    alive: Iterable[Alive],
    beginnings: Mapping[str, str],
    cut: bool,
) -> set[int]:
    """Bring what is known up to a batch, of which `note_positions` was told; return the hours whose windows changed.

    Hours are the Unix seconds of their beginnings. ``cut``: something is missing, so no queue's books can be whole.
    """
    for key, event in beginnings.items():
        state.books.setdefault(key, Books(whole=event in _FIRST))
    if cut:
        for books in state.books.values():
            books.whole = False
    hours = set()
    for count in counts:
        _count(state.books.setdefault(count.key, Books(whole=False)), count)
        if _in_window(state, count):
            hours.add(count.window - count.window % _HOUR)
    _take_stock(state, alive)
    resolve(state)
    return hours


def _take_stock(state: State, alive: Iterable[Alive]) -> None:
    gone = 0
    for books in state.books.values():
        books.live = {}
    for one in alive:
        books = state.books[one.key]
        if one.here:
            books.live[one.state] = one.number
        else:
            books.gone += one.number
            gone += one.number
    if gone:
        state.gaps.append(
            Gap(kind="reset", shard=0, run="", first=0, last=0, number=gone, at=state.frontier)
        )
    del state.gaps[:-_GAPS]


def without_old_windows(state: State, seconds: int, keep: int) -> None:
    """Forget the windows that can change no more: whole hours, as these are written whole."""
    horizon = max(state.horizon, int(state.frontier - seconds * keep) // _HOUR * _HOUR)
    state.horizon = horizon
    for key, windows in list(state.windows.items()):
        state.windows[key] = {start: one for start, one in windows.items() if start >= horizon}
        if not state.windows[key]:
            del state.windows[key]


def _lacking(one: Read, known: Position | None) -> int:
    expected = known.last + 1 if known else 1
    within = one.last - one.first + 1 - one.different
    return max(0, one.first - expected) + max(0, within)


def _count(books: Books, count: Count) -> None:
    if count.name.startswith("event:"):
        event = count.name.removeprefix("event:")
        books.events[event] = books.events.get(event, 0) + count.number
    elif count.name in ENDS:
        books.ended[count.name] = books.ended.get(count.name, 0) + count.number
    elif count.name in ("published", "adopted", "doubled"):
        setattr(books, count.name, getattr(books, count.name) + count.number)


def _in_window(state: State, count: Count) -> bool:
    side, _, counter = count.name.rpartition(":")
    if side in ("low", "high"):
        if state.probe is not None:
            sums = getattr(state.probe, side).setdefault(count.key, {})
            sums[counter] = sums.get(counter, 0) + count.number
        return False
    if not (side or count.name in ("waits", "runs")):
        return False
    if count.window < state.horizon:
        state.late += count.number if side else 0
        return False
    window = state.windows.setdefault(count.key, {}).setdefault(count.window, Window())
    if side:
        window.events[counter] = window.events.get(counter, 0) + count.number
    elif count.place is not None:
        classes = window.waits if count.name == "waits" else window.runs
        classes[count.place] = classes.get(count.place, 0) + count.number
    return True
