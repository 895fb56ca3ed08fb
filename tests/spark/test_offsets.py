"""Tests of the size of a stream's step: all shards are read up to the same time, and every step makes progress."""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import Any, cast

import pytest

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.journals.contract import HistoryMissing, Journal, ReadRange
from taskqueue_spark.offsets import Offsets, admitted, checked


class Times:
    """A journal that consists only of the time of each position, by shard."""

    def __init__(self, **times: list[int]) -> None:
        self.times = times

    def spans(self) -> dict[str, ReadRange]:
        """Implement `Journal.spans`."""
        return {shard: ReadRange("r", 0, len(times)) for shard, times in self.times.items()}

    def after(self, shard: str, position: int, rows: int, end: int) -> int:
        """Implement `Journal.after`."""
        return min(position + rows, end, len(self.times[shard]))

    def time(self, shard: str, position: int) -> int | None:
        """Implement `Journal.time`."""
        times = self.times[shard]
        return times[position] if position < len(times) else None

    def at(self, shard: str, time: int, start: int, end: int) -> int:
        """Implement `Journal.at`."""
        return bisect_left(self.times[shard], time, start, end)

    def rows(self, shard: str, start: int, end: int) -> int:
        """Implement `Journal.rows`."""
        assert shard in self.times
        return end - start


def steps(
    journal: Times, rows: int | None = None, seconds: float | None = None
) -> list[dict[str, int]]:
    """Step to the end of the journal, and return how many rows of each shard each step read."""
    places = Offsets(dict.fromkeys(journal.times, ("r", 0)))
    taken: list[dict[str, int]] = []
    while True:
        told = admitted(cast("Journal", journal), places, journal.spans(), rows, seconds)
        if told == places:
            assert all(place == ("r", len(journal.times[shard])) for shard, place in told.items())
            return taken
        taken.append({shard: told[shard][1] - places[shard][1] for shard in told})
        before = [journal.times[s][places[s][1] : told[s][1]] for s in told]
        after = [journal.times[s][told[s][1] : told[s][1] + 1] for s in told]
        assert max(time for times in before for time in times) <= min(
            (time for times in after for time in times), default=2**63
        )
        places = told


def test_a_hot_shard_and_a_cold_one_are_cut_at_one_time() -> None:
    """No step reads a row that is later than a row of a following step (G8)."""
    journal = Times(hot=list(range(100_000)), cold=list(range(0, 100_000, 20)))
    taken = steps(journal, rows=10_000)
    assert all(sum(step.values()) <= 10_000 for step in taken)
    assert len(taken) <= 14


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_shards_are_like(seed: int) -> None:
    """Any mix of shards is read to its end, each row once and in order of time (G8)."""
    rng = random.Random(seed)
    times = {
        f"s{n}": sorted(
            rng.randrange(rng.choice([3, 100, 10_000])) for _ in range(rng.randrange(200))
        )
        for n in range(rng.randrange(1, 6))
    }
    journal = Times(**times)
    assert sum(sum(step.values()) for step in steps(journal, rows=rng.randrange(1, 60))) == sum(
        map(len, times.values())
    )
    steps(journal, seconds=rng.randrange(1, 500) / 1e6)
    steps(journal, rows=rng.randrange(1, 60), seconds=rng.randrange(1, 500) / 1e6)


def test_what_one_instant_has_stays_together() -> None:
    """A step reads all rows of one time, even if they are more than its limit (G8)."""
    assert steps(Times(a=[5] * 30 + [6], b=[5] * 4), rows=10) == [
        {"a": 30, "b": 4},
        {"a": 1, "b": 0},
    ]


def test_a_clock_that_was_set_back_stops_nothing() -> None:
    """If the times in a shard decrease, steps are limited by rows alone and still make progress (G8)."""
    journal = Times(a=[100, 101, 102, 1, 2, 3, 4, 200])
    places, taken = Offsets(a=("r", 0)), 0
    while places["a"][1] < 8:
        places = admitted(cast("Journal", journal), places, journal.spans(), 2, None)
        taken += 1
        assert taken < 9


def test_a_span_of_time_limits_a_step() -> None:
    """A step covers at most the given number of seconds of the journal (G8)."""
    journal = Times(a=[0, 1_000_000, 2_000_000, 9_000_000], b=[500_000, 1_900_000])
    assert steps(journal, seconds=2) == [{"a": 2, "b": 2}, {"a": 1, "b": 0}, {"a": 1, "b": 0}]


SPANS = {"a": ReadRange("r", 10, 20)}


@pytest.mark.parametrize(
    ("place", "found", "why"),
    [
        (("r", 15), ("r", 15), None),
        (("r", 20), ("r", 20), None),
        (("", 12), ("r", 12), None),
        (("r", 3), ("r", 10), "3 to 9 no longer exist"),
        (("", 3), ("r", 10), "3 to 9 no longer exist"),
        (("r", 25), ("r", 20), "ends at 20"),
        (("q", 15), ("r", 10), "start again"),
    ],
)
def test_what_is_missing_is_said(place: Any, found: Any, why: str | None) -> None:
    """A position that no longer exists raises an error that says what is gone, or is moved to the next one (G8)."""
    assert checked(Offsets(a=place), SPANS, fail=False) == {"a": found}
    if why is None:
        assert checked(Offsets(a=place), SPANS, fail=True) == {"a": found}
    else:
        with pytest.raises(HistoryMissing, match=why) as raised:
            checked(Offsets(a=place), SPANS, fail=True)
        assert "failOnDataLoss" in str(raised.value)


def test_a_shard_that_is_gone() -> None:
    """A deleted file that was partly read raises an error, while one of which nothing was read does not (G8)."""
    assert checked(Offsets(z=("q", 0)), SPANS, fail=True) == {"z": ("q", 0)}
    with pytest.raises(HistoryMissing, match="no longer exists"):
        checked(Offsets(z=("q", 9)), SPANS, fail=True)


def test_a_shard_that_has_another_name() -> None:
    """A renamed shard is recognised by its run, unless another known shard has that run (G8; fault L2)."""
    assert checked(Offsets(z=("r", 12)), SPANS, fail=True) == {"a": ("r", 12)}
    assert checked(Offsets(z=("r", 12), y=("r", 15)), SPANS, fail=True) == {"a": ("r", 15)}
    taken = Offsets(z=("r", 12), a=("q", 11))
    assert checked(taken, SPANS, fail=False) == {"a": ("r", 12)}
    with pytest.raises(HistoryMissing, match="start again"):
        checked(taken, SPANS, fail=True)
    copied = Offsets(z=("r", 12), a=("r", 15))
    assert checked(copied, SPANS, fail=False) == copied
    assert checked(Offsets(z=("", 12)), {"a": ReadRange("", 0, 0)}, fail=False) == {"z": ("", 12)}


def test_offsets_are_json() -> None:
    """Offsets can be written as JSON and read again; invalid text is refused without being repeated (G8)."""
    offsets = Offsets({"{tq:0}": ("r", 5), "b": ("", 0)})
    assert Offsets.parse("startingOffsets", offsets.text) == offsets
    assert Offsets.parse("startingOffsets", '{"b": 7}') == {"b": ("", 7)}
    wrong = [
        "secret",
        "[]",
        '{"a": -1}',
        '{"a": true}',
        '{"a": {"next": "secret"}}',
        '{"a": {"run": 1}}',
    ]
    for text in wrong:
        with pytest.raises(InvalidInput, match="startingOffsets") as raised:
            Offsets.parse("startingOffsets", text)
        assert "secret" not in str(raised.value)
