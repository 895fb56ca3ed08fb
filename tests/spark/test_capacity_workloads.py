"""Tests of capacity advice from short recordings of ten workloads, compared with long runs of the same workloads."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from taskqueue_spark.pipeline.forecast import advise
from taskqueue_spark.pipeline.queueing import Floats, least, replay
from taskqueue_spark.pipeline.recording import Blocks, Contention, contention_of, drift_of

Draw = Callable[[int, np.random.Generator], Floats]
RECORDED, LONG, MOST = 5_000, 100_000, 400
P = 0.95


def poisson(rate: float) -> Draw:
    """Return arrivals at random moments."""
    return lambda count, draw: np.cumsum(draw.exponential(1 / rate, count))


def changing(low: float, high: float, period: float) -> Draw:
    """Return arrivals whose rate changes between two values, each for a random time with mean ``period``."""

    def arrivals(count: int, draw: np.random.Generator) -> Floats:
        parts: list[Floats] = []
        now, total = 0.0, 0
        while total < count:
            for rate in (low, high):
                length = draw.exponential(period)
                number = draw.poisson(rate * length)
                parts.append(now + np.sort(draw.uniform(0, length, number)))
                now, total = now + length, total + number
        return np.concatenate(parts)[:count]

    return arrivals


def batches(rate: float, size: int) -> Draw:
    """Return arrivals in batches."""
    return lambda count, draw: np.repeat(
        np.cumsum(draw.exponential(size / rate, -(-count // size))), size
    )[:count]


def exponential(mean: float) -> Draw:
    """Return exponential running times."""
    return lambda count, draw: draw.exponential(mean, count)


def lognormal(mean: float, sigma: float) -> Draw:
    """Return running times of which few are long."""
    return lambda count, draw: mean * draw.lognormal(-sigma * sigma / 2, sigma, count)


def mixed(mean: float) -> Draw:
    """Return running times of two kinds of tasks, of which one kind takes eleven times as long."""
    return lambda count, draw: np.where(
        draw.random(count) < 0.1, draw.exponential(5.5 * mean, count), draw.exponential(0.5 * mean, count)
    )  # fmt: skip


WORKLOADS: dict[str, tuple[Draw, Draw, float]] = {
    "few slots": (poisson(2), exponential(1.0), 1.0),
    "many slots": (poisson(300), exponential(0.1), 0.02),
    "constant times": (poisson(20), lambda count, _: np.full(count, 0.3), 0.1),
    "long tail": (poisson(10), lognormal(0.5, 1.0), 0.3),
    "two kinds": (poisson(10), mixed(0.4), 0.5),
    "changing rate": (changing(5, 25, 10), exponential(0.3), 1.0),
    "slowly changing rate": (changing(5, 25, 60), exponential(0.3), 1.0),
    "batches": (batches(20, 10), exponential(0.2), 0.5),
    "regular": (lambda count, draw: np.arange(count) / 10 + draw.uniform(0, 0.02, count), lognormal(0.45, 0.5), 0.1),
    "busy": (poisson(10), exponential(1.0), 5.0),
}  # fmt: skip


def quantile(arrived: Floats, held: Floats, slots: int, **more: Any) -> float:
    """Return the 95th percentile of the waits with a number of slots."""
    return float(np.quantile(replay(arrived, held, slots, **more), P))


def ends_of(started: Floats, alone: Floats, contention: Contention) -> Floats:
    """Return the ends of tasks that slow each other down."""
    ended = np.empty(len(started))
    running: list[float] = []
    for index in np.argsort(started, kind="stable"):
        while running and running[0] <= started[index]:
            heapq.heappop(running)
        ended[index] = started[index] + alone[index] * contention.factor(len(running) + 1)
        heapq.heappush(running, ended[index])
    return ended


@pytest.mark.parametrize("name", WORKLOADS)
def test_advice_from_a_short_recording(name: str) -> None:
    """From 5,000 tasks, the slots are at most 15 % (or one slot) from the truth, or a reason is given (G10).

    The truth is the least number with which 100,000 tasks of the same workload meet the target.
    """
    arrivals, times, target = WORKLOADS[name]
    draw = np.random.default_rng(1)
    arrived, held = arrivals(LONG, draw), times(LONG, draw)
    load = (LONG - 1) / (arrived[-1] - arrived[0]) * float(held.mean())
    truth = least(
        lambda slots: quantile(arrived, held, slots) <= target, math.floor(load) + 1, MOST
    )
    assert truth is not None
    given = 0
    for seed in range(100, 105):
        draw = np.random.default_rng(seed)
        arrived, held = arrivals(RECORDED, draw), times(RECORDED, draw)
        started = arrived + replay(arrived, held, truth)
        found = advise(arrived=arrived, started=started, ended=started + held, target_wait=target)
        if "slots" in found:
            given += 1
            assert abs(found["slots"] - truth) <= max(1, 0.15 * truth), seed
            assert found["expected_low"] <= found["expected_wait"] <= found["expected_high"]
            assert found["expected_wait"] <= target
        else:
            assert "too short" in found["unreachable"] or "drifts" in found["unreachable"], seed
    assert given >= 3


@pytest.mark.parametrize("contention", [Contention(0.05, 0.0, 0), Contention(0.0, 0.01, 0)])
def test_times_that_grow_with_the_load(contention: Contention) -> None:
    """Running times recorded with many tasks at once are not taken for those with fewer slots (G10).

    The recording has more slots than the advice. Far beyond what was recorded, no slots are advised.
    """
    arrivals, times, target = poisson(10), exponential(0.4), 0.3
    draw = np.random.default_rng(1)
    arrived, alone = arrivals(LONG, draw), times(LONG, draw)
    truth = least(
        lambda slots: quantile(arrived, alone, slots, slowdown=contention.factor) <= target, 4, MOST
    )
    assert truth is not None
    draw = np.random.default_rng(100)
    arrived, alone = arrivals(4 * RECORDED, draw), times(4 * RECORDED, draw)
    started = arrived + replay(arrived, alone, 2 * truth, slowdown=contention.factor)
    ended = ends_of(started, alone, contention)
    recorded, busy = contention_of(started, ended)
    assert recorded is not None
    assert recorded.factor(8) == pytest.approx(contention.factor(8), rel=0.15)
    assert recorded.most == int(np.max(busy)) <= recorded.reach <= 2 * recorded.most
    found = advise(arrived=arrived, started=started, ended=ended, target_wait=target)
    assert abs(found["slots"] - truth) <= max(1, 0.15 * truth)
    few = arrived + replay(arrived, alone, truth, slowdown=contention.factor)
    ended = ends_of(few, alone, contention)
    hopeless = advise(arrived=arrived, started=few, ended=ended, target_wait=1e-9, percentile=0.999)
    assert "running times grow" in hopeless["unreachable"]


def test_a_recording_that_drifts() -> None:
    """If the arrival rate or the running time drifts, there is a reason instead of advice (G10)."""
    draw = np.random.default_rng(3)
    rising = np.cumsum(draw.exponential(1, RECORDED) / np.linspace(5, 15, RECORDED))
    steady, held = np.cumsum(draw.exponential(0.1, RECORDED)), draw.exponential(0.3, RECORDED)
    slower = held * np.linspace(0.5, 1.5, RECORDED)
    for arrived, times, what in (
        (rising, held, "arrival rate drifts"),
        (steady, slower, "running time drifts"),
    ):
        found = advise(arrived=arrived, started=arrived, ended=arrived + times, target_wait=0.2)
        assert what in found["unreachable"]
        assert "slots" not in found
    assert drift_of(steady, held) is None


def test_a_bound_needs_blocks() -> None:
    """Blocks are longer than the relaxation time, so a queue near its limit has too few for a bound (G10)."""
    draw = np.random.default_rng(4)
    arrived, held = np.cumsum(draw.exponential(1 / 9.9, 1000)), draw.exponential(1.0, 1000)
    load = 999 / float(arrived[-1] - arrived[0]) * float(held.mean())
    assert not Blocks(arrived, held, math.floor(load) + 1).enough
    assert not Blocks(arrived, held, 1).enough
    blocks = Blocks(arrived, held, 30)
    assert blocks.enough
    waits = np.where(np.arange(1000) < 100, 1.0, 0.0)
    assert 0.1 < blocks.share_above(waits, 0.5) < 0.5
    low, high = blocks.range_of(np.linspace(0, 1, 1000), 0.5)
    assert low < 0.5 < high
