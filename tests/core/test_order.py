"""Fair turns and the floor share, by numbers alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqueue_core.authoring.fair_order import (
    TURN,
    FairRotation,
    PriorityFloor,
    cost,
    joins_at,
    returns_at,
)


def turns(walk: FairRotation[str], count: int, weights: dict[str, int] | None = None) -> str:
    """So many turns, by name."""
    taken = []
    for _ in range(count):
        who = walk.next()
        assert who is not None
        walk.spend(who, (weights or {}).get(who, 1))
        taken.append(who)
    return "".join(taken)


def walk_of(names: str) -> FairRotation[str]:
    """Some that have joined in this order."""
    walk: FairRotation[str] = FairRotation()
    for name in names:
        walk.join(name)
    return walk


def test_equal_weights_are_round_robin() -> None:
    """B2: each in turn, in the order of joining."""
    assert turns(walk_of("abc"), 9) == "abcabcabc"


def test_who_joins_comes_behind_the_others() -> None:
    """B2: nobody who is there already loses a turn by a new one."""
    walk = walk_of("abc")
    assert turns(walk, 1) == "a"
    walk.join("d")
    assert turns(walk, 8) == "bcadbcad"


def test_who_leaves_is_forgotten() -> None:
    """B2: its place is gone, and joining again is behind the others, however little it had spent."""
    walk = walk_of("abc")
    walk.leave("b")
    assert turns(walk, 2) == "ac"
    walk.join("b")
    assert turns(walk, 6) == "acbacb"
    for name in "abc":
        walk.leave(name)
    assert walk.next() is None
    assert len(walk) == 0


def test_a_rest_is_not_made_up_for() -> None:
    """OPEN-F1: who could not be served for a hundred turns has one turn in each round after, and no more."""
    walk = walk_of("ab")
    spent = walk.leave("a")
    assert turns(walk, 100) == "b" * 100
    walk.come_back("a", spent)
    assert turns(walk, 6) in ("bababa", "ababab")


def test_a_rest_costs_nothing() -> None:
    """OPEN-F1: who comes back finds nobody far behind it who had joined while nobody was there."""
    walk = walk_of("a")
    turns(walk, 50)
    spent = walk.leave("a")
    walk.join("b")
    assert turns(walk, 3) == "bbb"
    walk.come_back("a", spent)
    assert Counter(turns(walk, 10)) == {"a": 5, "b": 5}


def test_a_quick_round_trip_gains_nothing() -> None:
    """B2: who leaves after each turn and joins again has no more turns than the others."""
    walk = walk_of("ab")
    taken: Counter[str] = Counter()
    for _ in range(100):
        who = turns(walk, 1)
        taken[who] += 1
        if who == "a":
            walk.leave("a")
            walk.join("a")
    assert taken == {"a": 50, "b": 50}


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 25), min_size=1))
def test_weights_are_exact(weights: dict[str, int]) -> None:
    """OPEN-B4: in each round everybody has exactly as many turns as its weight says."""
    walk, total = walk_of("".join(weights)), sum(weights.values())
    turns(walk, 4 * total, weights)  # until all have begun
    for _ in range(5):
        assert Counter(turns(walk, total, weights)) == weights


def test_who_has_spent_the_same_has_spent_the_same() -> None:
    """OPEN-B4: ten turns of weight 10 are one of weight 1, to the last bit."""
    assert [weight * cost(weight) for weight in (1, 3, 7, 10, 25, 100, 1000)] == [TURN] * 7
    assert turns(walk_of("ab"), 22, {"a": 10}) == 2 * ("a" * 10 + "b")


def test_numbers_for_a_store() -> None:
    """OPEN-B4: the same rules for who keeps the numbers elsewhere."""
    assert (joins_at(5, alone=True), joins_at(5, alone=False)) == (5, 5 + TURN)
    assert [returns_at(spent, 5) for spent in (0, 7, 9 * TURN)] == [5, 7, 5 + TURN]


def test_a_walk_keeps_no_more_than_who_is_there() -> None:
    """OPEN-B2: joining and leaving for ever takes no memory."""
    walk = walk_of("a")
    for _ in range(10_000):
        walk.join("b")
        walk.leave("b")
    assert len(walk._heap) < 200
    assert turns(walk, 2) == "aa"


@pytest.mark.parametrize(("share", "every"), [(0.1, 10), (0.25, 4), (0.5, 2), (0.001, 1000)])
def test_the_floor_share(share: float, every: int) -> None:
    """OPEN-C8: of so many hand-outs the last is of the lowest, time after time."""
    floor = PriorityFloor()
    for _ in range(20):
        lowest = []
        for _ in range(every):
            lowest.append(floor.is_next(share))
            floor.handed_out(share)
        assert lowest == [False] * (every - 1) + [True]


def test_an_uneven_floor_share() -> None:
    """OPEN-C8: a share that is no part of one comes out in the long run."""
    floor, lowest = PriorityFloor(), 0
    for _ in range(1000):
        lowest += floor.is_next(0.3)
        floor.handed_out(0.3)
    assert lowest == 300
