"""Computation of the new state from the former state and a batch's counts, in plain Python, without a clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from taskqueue_spark.service.aggregate import Beginning, EventCount, Read
from taskqueue_spark.service.balance import resolve
from taskqueue_spark.service.state import (
    ENDS,
    Gap,
    Position,
    QueueCounts,
    ServiceState,
    WindowCounts,
)

_HOUR = 3600
_GAPS = 100
"""maximum number of gaps that are kept in the state"""
_AHEAD = 60.0
"""seconds by which the clock of a store may be ahead of the local one"""


class Alive(msgspec.Struct, frozen=True):
    """The number of a queue's tasks in a state. ``here`` is false for tasks of a store that was reset."""

    key: str
    state: str
    here: bool
    number: int


def horizon_of(now: float) -> float:
    """Return the latest plausible time of a transition (Unix seconds), with tolerance for a clock that is ahead."""
    return now + _AHEAD


def note_positions(state: ServiceState, read: Sequence[Read], now: float) -> bool:
    """Record how far each run was read. Return whether a number is missing or was used again. ``now``: Unix time."""
    cut = False
    ahead = horizon_of(now)
    for item in read:
        position = f"{item.run}/{item.shard}"
        known = state.positions.get(position)
        former = any(other.endswith(f"/{item.shard}") for other in state.positions)
        expected = known.last + 1 if known else 1
        within = item.last - item.first + 1 - item.different
        lacking = max(0, item.first - expected) + max(0, within)
        again = known is not None and item.different > 0 and item.first <= known.last
        back = min(item.different, known.last - item.first + 1) if known and again else item.doubled
        cut |= lacking > 0 or back > 0
        if back:
            last = known.last if known and again else item.last
            state.gaps.append(
                Gap(
                    kind="back", shard=item.shard, run=item.run, first=item.first, last=last, number=back,
                    at=item.since,
                )
            )  # fmt: skip
        # Transitions that were removed before the first read of a shard are not reported as a gap.
        if lacking and former:
            _missing(state, item, expected, lacking)
        # A row about missing transitions has no time of its own, so use the known time.
        heard = item if item.different or known is None else known
        since, until = min(heard.since, ahead), min(heard.until, ahead)
        state.positions[position] = Position(
            last=item.last if again or known is None else max(item.last, known.last),
            missing=lacking + (known.missing if known else 0),
            since=min(since, known.since if known else since),
            until=max(until, known.until if known else until),
        )
        state.frontier = max(state.frontier, until)
    return cut


def _missing(state: ServiceState, item: Read, expected: int, lacking: int) -> None:
    gap = Gap(
        kind="missing", shard=item.shard, run=item.run, first=min(expected, item.first), last=item.last,
        number=lacking, at=item.since,
    )  # fmt: skip
    latest = state.gaps[-1] if state.gaps else None
    # Extend the latest gap if the new gap directly follows it.
    if (
        latest is not None
        and (latest.kind, latest.run, latest.shard, latest.last + 1)
        == ("missing", item.run, item.shard, gap.first)
        and latest.number == latest.last - latest.first + 1
        and not item.different
    ):
        number = latest.number + lacking
        state.gaps[-1] = msgspec.structs.replace(latest, last=gap.last, number=number)
    else:
        state.gaps.append(gap)


def advance(
    state: ServiceState,
    *,
    counts: Iterable[EventCount],
    alive: Iterable[Alive],
    beginnings: Mapping[str, Beginning],
    cut: bool,
) -> set[int]:
    """Update the state with a batch, after `note_positions`. Return the hours whose windows changed.

    An hour is given as the Unix time of its beginning. ``cut``: whether transitions are missing or numbers were used
    again; no queue's counts are complete then.
    """
    torn = {
        shard
        for shard, runs in state.current().items()
        for run in runs
        if state.positions[f"{run}/{shard}"].missing
    }
    for key, begin in beginnings.items():
        books = state.books.setdefault(
            key, QueueCounts(whole=begin.whole and begin.shard not in torn)
        )
        books.whole &= not begin.dark
    if cut:
        for books in state.books.values():
            books.whole = False
    hours = set()
    for count in counts:
        _count(state.books.setdefault(count.key, QueueCounts(whole=False)), count)
        if _in_window(state, count):
            hours.add(count.window - count.window % _HOUR)
    _update_live(state, alive)
    resolve(state)
    return hours


def _update_live(state: ServiceState, alive: Iterable[Alive]) -> None:
    gone = 0
    for books in state.books.values():
        books.live = {}
    for item in alive:
        books = state.books[item.key]
        if item.here:
            books.live[item.state] = item.number
        else:
            books.expired += item.number
            gone += item.number
    if gone:
        state.gaps.append(
            Gap(kind="reset", shard=0, run="", first=0, last=0, number=gone, at=state.frontier)
        )
    del state.gaps[:-_GAPS]


def without_old_windows(state: ServiceState, seconds: int, keep: int) -> None:
    """Remove windows that can no longer change: whole hours at a time, because each file holds one hour."""
    horizon = max(state.horizon, int(state.frontier - seconds * keep) // _HOUR * _HOUR)
    state.horizon = horizon
    for key, windows in list(state.windows.items()):
        state.windows[key] = {
            start: window for start, window in windows.items() if start >= horizon
        }
        if not state.windows[key]:
            del state.windows[key]


def _count(books: QueueCounts, count: EventCount) -> None:
    if count.name.startswith("event:"):
        event = count.name.removeprefix("event:")
        books.events[event] = books.events.get(event, 0) + count.number
    elif count.name in ENDS:
        books.ended[count.name] = books.ended.get(count.name, 0) + count.number
    elif count.name in ("published", "adopted", "doubled"):
        setattr(books, count.name, getattr(books, count.name) + count.number)


def _in_window(state: ServiceState, count: EventCount) -> bool:
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
    window = state.windows.setdefault(count.key, {}).setdefault(count.window, WindowCounts())
    if side:
        window.events[counter] = window.events.get(counter, 0) + count.number
    elif count.position is not None:
        classes = window.waits if count.name == "waits" else window.runs
        classes[count.position] = classes.get(count.position, 0) + count.number
    return True
