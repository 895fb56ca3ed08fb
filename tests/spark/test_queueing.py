"""Tests of the queueing formulas against known values, and of the replay against a plain simulation."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from taskqueue_spark.pipeline.queueing import (
    Floats,
    bucket,
    erlang_c,
    least,
    replay,
    scv,
    wait_quantile,
)


def load(seed: int, tasks: int, rate: float) -> tuple[Floats, Floats]:
    """Return arrivals of a Poisson process, and exponential durations with mean 1."""
    draw = np.random.default_rng(seed)
    return np.cumsum(draw.exponential(1 / rate, tasks)), draw.exponential(1.0, tasks)


def test_the_chance_to_wait_is_what_the_tables_say() -> None:
    """The Erlang C formula gives the known values, also for no load and for overload (G10)."""
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)
    assert erlang_c(3, 0.0) == 0
    assert erlang_c(3, 3.0) == 1
    assert 0 < erlang_c(2000, 1900.0) < 1


def test_the_tail_of_one_slot_is_exponential() -> None:
    """For M/M/1 the formula is exact, 0 for many slots, and infinite for full load (G10)."""
    chance = {"rate": 0.8, "mean": 1.0, "arrival_scv": 1.0, "held_scv": 1.0}
    assert wait_quantile(0.95, slots=1, **chance) == pytest.approx(math.log(0.8 / 0.05) / 0.2)
    assert wait_quantile(0.95, slots=5, **chance) == 0
    assert wait_quantile(0.95, slots=1, **chance | {"rate": 1.0}) == math.inf


def test_the_replay_agrees_with_the_formula_where_that_is_exact() -> None:
    """For M/M/4 the replay agrees with the formula for the 95th percentile (G10)."""
    arrived, held = load(1, 200_000, 3.2)
    found = float(np.quantile(replay(arrived, held, 4), 0.95))
    told = wait_quantile(0.95, slots=4, rate=3.2, mean=1.0, arrival_scv=1.0, held_scv=1.0)
    assert found == pytest.approx(told, rel=0.08)
    assert scv(held) == pytest.approx(1, rel=0.05)
    assert scv(np.array([])) == 0


@pytest.mark.parametrize("classes", [1, 3])
def test_the_replay_agrees_with_a_plain_simulation(classes: int) -> None:
    """The replay equals a simulation in which each free slot takes the first task of the highest priority (G10)."""
    arrived, held = load(2, 400, 2.5)
    chance = random.Random(classes)
    priorities = np.array([chance.randrange(classes) for _ in arrived])
    found = replay(arrived, held, 3, overhead=0.01, priorities=priorities)

    starts: dict[int, float] = {}
    ends: list[float] = []
    moments = sorted(arrived)
    while moments:
        now = moments.pop(0)
        waiting = [n for n, arrival in enumerate(arrived) if arrival <= now and n not in starts]
        for place in sorted(waiting, key=lambda n: (-priorities[n], n)):
            if sum(end > now for end in ends) < 3:
                starts[place] = now + 0.01
                ends.append(now + 0.01 + held[place])
                moments = sorted([*moments, ends[-1]])
    assert found == pytest.approx([starts[n] - arrived[n] for n in range(len(arrived))])


def test_tasks_that_slow_each_other_down() -> None:
    """A task takes longer by the number of tasks that run at its start, itself included (G10)."""
    arrived, held = np.array([0.0, 0.0, 0.0, 10.0]), np.ones(4)
    waits = replay(arrived, held, 2, slowdown=float)
    # the first takes 1 s alone, the second 2 s; the third begins after 1 s, and the last one is alone again
    assert waits.tolist() == [0, 0, 1, 0]
    plain = load(7, 500, 2.5)
    same = replay(*plain, 3, overhead=0.01, slowdown=lambda _: 1.0)
    assert same == pytest.approx(replay(*plain, 3, overhead=0.01))


def test_more_slots_never_make_anybody_wait_longer() -> None:
    """More slots never make a task wait longer, so the search for the smallest number can use bisection (G10)."""
    arrived, held = load(3, 2000, 5.0)
    waits = [replay(arrived, held, slots) for slots in range(4, 12)]
    assert all((more <= less).all() for less, more in pairwise(waits))


@pytest.mark.parametrize("wanted", [1, 2, 7, 8, 100, 101])
def test_the_least_that_fits_is_found(wanted: int) -> None:
    """The smallest suitable number is found, or ``None`` if there is none (G10)."""
    assert least(lambda number: number >= wanted, 1, 100) == (wanted if wanted <= 100 else None)
    assert least(lambda number: number >= wanted, 90, 100) == (
        max(wanted, 90) if wanted <= 100 else None
    )


def test_a_bucket_is_as_large_as_the_deliveries_need() -> None:
    """With the returned number of tokens no delivery has to wait, and with one less some would (G10)."""
    started = np.sort(load(4, 500, 8.0)[0])

    def holds(tokens: int) -> bool:
        left, last = float(tokens), started[0]
        for moment in started:
            left, last = min(tokens, left + 10.0 * (moment - last)), moment
            left -= 1
            if left < -1e-9:
                return False
        return True

    found = bucket(started, 10.0)
    assert holds(found)
    assert not holds(found - 1)
    assert bucket(np.array([]), 1.0) == 1
    assert bucket(np.zeros(5), 1.0) == 5
