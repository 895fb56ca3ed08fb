"""The arithmetic of fair order: how tenants take turns, and how often each priority is served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

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
    """Take ``count`` turns and return the names in the order in which they came, one letter each."""
    taken = []
    for _ in range(count):
        who = walk.next()
        assert who is not None
        walk.spend(who, (weights or {}).get(who, 1))
        taken.append(who)
    return "".join(taken)


def walk_of(names: str) -> FairRotation[str]:
    """Return a rotation that these names have joined, one letter each, in this order."""
    walk: FairRotation[str] = FairRotation()
    for name in names:
        walk.join(name)
    return walk


def test_equal_weights_are_round_robin() -> None:
    """B2: members of equal weight take turns in the order in which they joined."""
    assert turns(walk_of("abc"), 9) == "abcabcabc"


def test_who_joins_comes_behind_the_others() -> None:
    """B2: a new member takes its first turn after all present members, so none of them loses a turn."""
    walk = walk_of("abc")
    assert turns(walk, 1) == "a"
    walk.join("d")
    assert turns(walk, 8) == "bcadbcad"


def test_who_leaves_is_forgotten() -> None:
    """B2: a member that leaves loses its place; if it joins again, it comes last, however few turns it had taken."""
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
    """OPEN-F1: a tenant that was skipped for 100 turns gets one turn per round afterwards, and does not catch up."""
    walk = walk_of("ab")
    spent = walk.leave("a")
    assert turns(walk, 100) == "b" * 100
    walk.come_back("a", spent)
    assert turns(walk, 6) in ("bababa", "ababab")


def test_a_rest_costs_nothing() -> None:
    """OPEN-F1: a tenant that returns gets as many turns as one that joined while the rotation was empty."""
    walk = walk_of("a")
    turns(walk, 50)
    spent = walk.leave("a")
    walk.join("b")
    assert turns(walk, 3) == "bbb"
    walk.come_back("a", spent)
    assert Counter(turns(walk, 10)) == {"a": 5, "b": 5}


def test_a_quick_round_trip_gains_nothing() -> None:
    """B2: a member that leaves after each turn and joins again gets no more turns than the others."""
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
    """OPEN-B4: in each round, every member gets exactly as many turns as its weight."""
    walk, total = walk_of("".join(weights)), sum(weights.values())
    turns(walk, 4 * total, weights)  # until every member has had its first turn
    for _ in range(5):
        assert Counter(turns(walk, total, weights)) == weights


def test_who_has_spent_the_same_has_spent_the_same() -> None:
    """OPEN-B4: with weight 10, ten turns cost exactly as much as one turn with weight 1."""
    assert [weight * cost(weight) for weight in (1, 3, 7, 10, 25, 100, 1000)] == [TURN] * 7
    assert turns(walk_of("ab"), 22, {"a": 10}) == 2 * ("a" * 10 + "b")


def test_numbers_for_a_store() -> None:
    """OPEN-B4: a store that keeps the numbers itself can compute them by the same rules."""
    assert (joins_at(5, alone=True), joins_at(5, alone=False)) == (5, 5 + TURN)
    assert [returns_at(spent, 5) for spent in (0, 7, 9 * TURN)] == [5, 7, 5 + TURN]


def test_a_walk_keeps_no_more_than_who_is_there() -> None:
    """OPEN-B2: members that join and leave again and again do not make the rotation grow."""
    walk = walk_of("a")
    for _ in range(10_000):
        walk.join("b")
        walk.leave("b")
    assert len(walk._heap) < 200
    assert turns(walk, 2) == "aa"


@pytest.mark.parametrize(("share", "every"), [(0.1, 10), (0.25, 4), (0.5, 2), (0.001, 1000)])
def test_the_floor_share(share: float, every: int) -> None:
    """OPEN-C8: with two priorities and a floor share of 1/n, every nth delivery is of the lower one."""
    floor = PriorityFloor()
    for _ in range(20):
        places = [deliver(floor, share, (9, 0)) for _ in range(every)]
        assert places == [0] * (every - 1) + [1]


def test_an_uneven_floor_share() -> None:
    """OPEN-C8: a share that is not 1/n, such as 0.3, is kept exactly over many deliveries."""
    floor = PriorityFloor()
    assert sum(deliver(floor, 0.3, (8, 1)) for _ in range(1000)) == 300


@given(st.floats(0.01, 0.5), st.sets(st.integers(0, 9), min_size=1))
def test_the_floor_share_of_each(share: float, priorities: set[int]) -> None:
    """OPEN-C8: each waiting priority gets its share, or an equal part if the shares amount to more than everything."""
    floor, present = PriorityFloor(), sorted(priorities, reverse=True)
    places = [deliver(floor, share, present) for _ in range(1000)]
    least = min(share, 1 / len(present))
    for place in range(1, len(present)):
        assert abs(places.count(place) - 1000 * least) <= 1.1
    assert places.count(0) >= 1000 / len(present) - 10


def test_the_floor_share_of_changing_priorities() -> None:
    """OPEN-C8: a waiting priority has its turn, although others come and go."""
    floor, present = PriorityFloor(), ((9, 4, 0), (9, 0), (9, 7, 0), (9, 7, 4, 0))
    places = [(deliver(floor, 0.1, now), now) for n in range(400) for now in [present[n // 3 % 4]]]
    lowest = [n for n, (place, now) in enumerate(places) if now[place] == 0]
    assert max(b - a for a, b in pairwise([0, *lowest])) <= 30


def deliver(floor: PriorityFloor, share: float, priorities: Sequence[int]) -> int:
    """Deliver from the priority whose turn is next, and return its position."""
    place = floor.next(share, priorities)
    floor.handed_out(share, priorities)
    return place
