"""What is known after a batch, from what was known before and what the batch has. Plain Python: no Spark, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from taskqueue_spark.service.aggregate import Beginning, Count, Read
from taskqueue_spark.service.balance import resolve
from taskqueue_spark.service.state import ENDS, Books, Gap, Position, State, Window

__all__ = ["Alive", "advance", "horizon_of", "note_positions", "without_old_windows"]

_HOUR = 3600
_GAPS = 100
"""breaks that are remembered"""
_AHEAD = 60.0
"""seconds by which the clock of a store may be ahead of this one's"""


class Alive(msgspec.Struct, frozen=True):
    """How many tasks of a queue are in a state; ``here`` tells those apart whose store began anew since."""

    key: str
    state: str
    here: bool
    number: int


def horizon_of(now: float) -> float:
    """Return behind which time (Unix seconds) nothing can have happened: no clock is that far ahead."""
    return now + _AHEAD


def note_positions(state: State, read: Sequence[Read], now: float) -> bool:
    """Note how far each count was read; return whether anything is missing. ``now``: in Unix seconds."""
    cut = False
    ahead = horizon_of(now)
    for one in read:
        place = f"{one.run}/{one.shard}"
        known = state.positions.get(place)
        former = any(other.endswith(f"/{one.shard}") for other in state.positions)
        lacking = _lacking(one, known)
        again = known is not None and one.different > 0 and one.first <= known.last
        cut |= lacking > 0 or again
        if known is not None and again:
            back = Gap(
                kind="back", shard=one.shard, run=one.run, first=one.first, last=known.last,
                number=min(one.different, known.last - one.first + 1), at=one.since,
            )  # fmt: skip
            state.gaps.append(back)
        # What was cut off before anybody read it is nothing that happened now.
        if lacking and former:
            _missing(state, one, known, lacking)
        heard = one if one.different or known is None else known  # what is missing has no time
        since, until = min(heard.since, ahead), min(heard.until, ahead)
        state.positions[place] = Position(
            last=one.last if again or known is None else max(one.last, known.last),
            missing=lacking + (known.missing if known else 0),
            since=min(since, known.since if known else since),
            until=max(until, known.until if known else until),
        )
        state.frontier = max(state.frontier, until)
    return cut


def _missing(state: State, one: Read, known: Position | None, lacking: int) -> None:
    expected = known.last + 1 if known else 1
    gap = Gap(
        kind="missing", shard=one.shard, run=one.run, first=min(expected, one.first), last=one.last,
        number=lacking, at=one.since,
    )  # fmt: skip
    latest = state.gaps[-1] if state.gaps else None
    # the latest one goes on
    if (
        latest is not None
        and (latest.kind, latest.run, latest.shard, latest.last + 1)
        == ("missing", one.run, one.shard, gap.first)
        and latest.number == latest.last - latest.first + 1
        and not one.different
    ):
        number = latest.number + lacking
        state.gaps[-1] = msgspec.structs.replace(latest, last=gap.last, number=number)
    else:
        state.gaps.append(gap)


def advance(
    state: State,
    *,
    counts: Iterable[Count],
    alive: Iterable[Alive],
    beginnings: Mapping[str, Beginning],
    cut: bool,
) -> set[int]:
    """Bring what is known up to a batch, of which `note_positions` was told; return the hours whose windows changed.

    Hours are the Unix seconds of their beginnings. ``cut``: something is missing, so no queue's books can be whole.
    """
    torn = {
        shard
        for shard, runs in state.current().items()
        for run in runs
        if state.positions[f"{run}/{shard}"].missing
    }
    for key, begin in beginnings.items():
        books = state.books.setdefault(key, Books(whole=begin.whole and begin.shard not in torn))
        books.whole &= not begin.dark
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
