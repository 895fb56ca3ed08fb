"""Tests of the capacity advice: a queue that follows the advice behaves as forecast."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.pipeline.capacity import ADVICE, advice
from taskqueue_spark.pipeline.forecast import advise
from taskqueue_spark.pipeline.queueing import Floats, replay
from tests.spark.load import poisson, run, transitions

RATE, MEAN, TARGET = 300.0, 0.02, 0.01
TASKS = 4_000
SECOND = 1_000_000


def row(seq: int, at: float, event: str, state: str, **more: Any) -> dict[str, Any]:
    """Return a transition that happens ``at`` seconds after a fixed start."""
    plain = {
        "shard": 0, "run": "r", "seq": seq, "ts": 1_700_000_000 * SECOND + round(at * SECOND), "event": event,
        "key": "k", "task_id": "", "attempt": 1, "losses": 0, "state": state, "priority": 0,
    }  # fmt: skip
    return plain | more


def steady(key: str, tasks: int, *, shard: int, first: int = 0, every: float = 1.0) -> list[Any]:
    """Return the rows of tasks that wait half a second and run for two seconds.

    One is published every ``every`` seconds.
    """
    rows = []
    for number in range(first, tasks):
        of = {"key": key, "task_id": f"{key}-{number}", "shard": shard}
        at = number * every
        rows += [
            row(3 * number + 1, at, "published", "waiting", **of),
            row(3 * number + 2, at + 0.5, "delivered", "in_flight", worker=f"w{number % 2}", **of),
            row(3 * number + 3, at + 2.5, "acked", "done", **of),
        ]
    return rows


def frame(spark: SparkSession, rows: list[Any] | pa.Table) -> DataFrame:
    """Return transitions as a Spark data frame."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=TRANSITIONS)
    return spark.createDataFrame(table)


def seen(journal: Path) -> tuple[Floats, Floats]:
    """Return the publishing times and waiting times of all tasks, in order of publishing."""
    at: dict[str, dict[str, float]] = {}
    for entry in transitions(journal).to_pylist():
        at.setdefault(entry["task_id"], {})[entry["event"]] = entry["ts"].timestamp()
    at.pop("")
    arrived = np.array([of["published"] for of in at.values()])
    return arrived, np.array([of["delivered"] for of in at.values()]) - arrived


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a journal of the load, run with more slots than it needs."""
    path = tmp_path_factory.mktemp("capacity") / "recorded"
    asyncio.run(run(path, poisson(1, TASKS, rate=RATE, mean=MEAN), 100))
    return path


def test_the_advice_holds_when_it_is_applied(
    spark: SparkSession, recorded: Path, tmp_path: Path
) -> None:
    """With the advised `max_inflight`, the p95 wait of another load is within 20 % of the forecast (G10)."""
    (found,) = advice(frame(spark, transitions(recorded)), TARGET).collect()
    assert found["reason"] is None
    assert found["arrival_rate"] == pytest.approx(RATE, rel=0.03)
    assert found["service_mean"] == pytest.approx(MEAN, rel=0.03)
    assert found["expected_low"] <= found["expected_wait"] <= found["expected_high"]
    assert found["expected_wait"] <= TARGET
    assert found["formula_wait"] == pytest.approx(found["expected_wait"], rel=0.3)
    assert found["rate_limit"] > found["arrival_rate"]
    assert found["max_tokens"] / found["interval"] >= found["rate_limit"]
    assert found["max_tokens"] >= found["burst"]

    other = tmp_path / "applied"
    load = poisson(2, TASKS, rate=RATE, mean=MEAN)
    asyncio.run(run(other, load, found["max_inflight"]))
    arrived, waits = seen(other)
    observed = float(np.quantile(waits, 0.95))
    assert observed == pytest.approx(found["expected_wait"], rel=0.2)
    held = np.array([time for _, time in load])
    forecast = replay(arrived, held, found["slots"])
    # the replay agrees with the queue for each task
    assert waits == pytest.approx(forecast, abs=1e-4)
    fewer = replay(arrived, held, found["slots"] - 1)
    assert float(np.quantile(fewer, 0.95)) > TARGET


@pytest.mark.usefixtures("compiled")
def test_each_key_has_advice_or_a_reason_for_none(spark: SparkSession) -> None:
    """A key with too little or trimmed history gets a reason instead of figures (G10; fault L2)."""
    cut = steady("cut", 400, shard=3)
    del cut[300:600]
    headless = [one for one in steady("headless", 300, shard=4) if one["event"] != "published"]
    later = {"key": "later", "task_id": "x", "shard": 5}
    rows = [
        *steady("steady", 400, shard=1),
        *steady("thin", 30, shard=2),
        *cut,
        *headless,
        row(1, 0.0, "published", "scheduled", due_at=1_700_000_009 * SECOND, **later),
        row(1, 0.0, "configured", "", key="empty", shard=6, reason="{}"),
        row(2, 0.0, "damaged", "", key="", shard=6, reason="line 7: not JSON"),
    ]
    given = frame(spark, rows)
    table = advice(given, 0.6)
    assert table.columns == [column.split()[0] for column in ADVICE.split(", ")]
    found = {one["key"]: one for one in table.collect()}
    assert set(found) == {"steady", "thin", "cut", "headless", "later"}
    reasons = {key: one["reason"] for key, one in found.items()}
    assert reasons["steady"] is None
    assert reasons["thin"] == "deliveries known from start to end: 30; needed: 200"
    assert reasons["later"] == "deliveries known from start to end: 0; needed: 200"
    assert reasons["cut"] == "25 % of the journal is missing"
    assert "is missing" in reasons["headless"]
    assert all(one["slots"] is None for key, one in found.items() if key != "steady")
    good = found["steady"]
    assert (good["slots"], good["deliveries"], good["workers_seen"]) == (3, 400, 2)
    assert good["overhead"] == pytest.approx(0.5)
    assert good["expected_wait"] == pytest.approx(0.5)
    assert good["peak_rate"] == pytest.approx(1.0)
    # each of the two workers had one task at a time, so three slots need three workers
    assert good["workers"] == 3


def test_the_busiest_stretch_is_replayed(spark: SparkSession) -> None:
    """If a key has more deliveries than the sample holds, its busiest part is sampled (G10)."""
    slow = steady("k", 300, shard=0)
    last = max(one["ts"] for one in slow)
    fast = [
        one | {"seq": one["seq"] + 900, "task_id": "f" + one["task_id"], "ts": one["ts"] + last - slow[0]["ts"]}
        for one in steady("k", 300, shard=0, every=0.1)
    ]  # fmt: skip
    cut = steady("cut", 400, shard=3)
    del cut[300:600]
    headless = [one for one in steady("headless", 300, shard=4) if one["event"] != "published"]
    given = frame(spark, [*slow, *fast, *slow[:30], *cut, *headless])
    found = {one["key"]: one for one in advice(given, 0.6, whole=False, sample=250).collect()}
    assert found["k"]["deliveries"] == 600  # repeated rows count once
    assert found["k"]["arrival_rate"] == pytest.approx(10, rel=0.05)
    assert found["k"]["sampled_from"] > found["k"]["sampled_to"] - timedelta(seconds=30)
    assert found["k"]["slots"] > 20
    assert found["cut"]["sampled"] == 250
    # without the check for gaps, the missing part looks like a time without arrivals, which is too much variation
    assert "too short" in found["cut"]["reason"]
    assert found["headless"]["reason"].startswith("300 of 300 deliveries")


def test_priorities_and_a_target_out_of_reach() -> None:
    """Deliveries by priority are replayed by priority, and an unreachable target is reported (G10)."""
    arrived = np.cumsum(np.full(1000, 0.1))
    started, ended = arrived + 0.2, arrived + 0.2 + 0.95
    classes = np.arange(1000) % 10
    found = advise(
        arrived=arrived, started=started, ended=ended, priorities=classes, target_wait=0.5
    )
    assert found["load"] == pytest.approx(9.5, rel=0.01)
    assert found["overhead"] == pytest.approx(0.2)
    assert found["slots"] >= 10
    assert "unreachable" in advise(arrived=arrived, started=started, ended=ended, target_wait=0.1)


@pytest.mark.parametrize(
    ("tasks", "over", "held", "at_once", "target"),
    [
        (300, 0.0, 0.1, 10, 1.05),
        (300, 0.0, 0.1, 300, 1.05),
        (1000, 1.0, 1.0, 20, 60.0),
        (300, 60.0, 0.0, 10, 1.0),
    ],
)
def test_a_burst_is_no_rate_for_ever(
    tasks: int, over: float, held: float, at_once: int, target: float
) -> None:
    """For a burst of tasks the advice is the smallest number of slots that meets the target.

    All figures are consistent with it (G10).
    """
    arrived, times = np.linspace(0, over, tasks), np.full(tasks, held)
    started = arrived + replay(arrived, times, at_once)
    found = advise(arrived=arrived, started=started, ended=started + times, target_wait=target)

    def fits(slots: int) -> bool:
        waits = replay(arrived, times, slots, overhead=found["overhead"])
        return float(np.quantile(waits, 0.95)) <= target

    assert found["slots"] == next(slots for slots in range(1, tasks + 1) if fits(slots))
    assert 0 <= found["utilisation"] <= 1
    assert found["arrival_rate"] <= min(found["rate_limit"], tasks / target)
    assert found["expected_wait"] <= target


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("target_wait", 0.0), ("target_wait", float("inf")), ("percentile", 95.0), ("sample", 10)],
)
def test_arguments_out_of_range_are_refused(field: str, wrong: float) -> None:
    """An argument out of range raises an error that names it, before the journal is read (G10)."""
    with pytest.raises(InvalidInput, match=field):
        advice(None, **{field: wrong})  # type: ignore[arg-type] # it is not looked at
