"""Tests of waiting times, run times and total times, by hand and against plain Python on random journals."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import Any

import pytest
from pyspark.sql import SparkSession

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.pipeline.durations import executions, seconds_of
from taskqueue_spark.pipeline.latency import latency
from tests.spark.compiling import compiling
from tests.spark.small_journals import (
    EPOCH,
    Row,
    SmallJournal,
    at,
    histories,
    nearest,
    plan_of,
    random_journal,
    window_keys,
)

_OVER = {"done", "expired", "cancelled", "discarded"}


def test_a_life_by_hand(spark: SparkSession) -> None:
    """A wait begins when a task is available, a run ends with an outcome, a life with its first end (G10)."""
    journal = SmallJournal()
    journal.tell(0, "configured", reason="{}")
    journal.tell(0, "damaged", reason="torn", key="")
    journal.tell(0, "published", "a", tenant="x")
    journal.tell(2, "delivered", "a", worker="w")  # waited 2 s
    journal.tell(5, "lost", "a", worker="w", losses=1)  # a loss is no outcome
    journal.tell(6, "delivered", "a", worker="w", losses=1)  # waited 1 s
    journal.tell(10, "retried", "a", attempt=2, due=20)  # ran 4 s
    journal.tell(24, "available", "a", attempt=2)  # available late; it was due at 20 s
    journal.tell(25, "delivered", "a", attempt=2)  # waited 5 s
    journal.tell(26, "dead_lettered", "a", attempt=2)  # ran 1 s, took 26 s in total
    journal.tell(40, "redriven", "a", attempt=2)
    journal.tell(43, "delivered", "a", attempt=2)  # waited 3 s
    journal.tell(45, "acked", "a", attempt=2)  # ran 2 s; its life ended at 26 s
    journal.tell(50, "published", "a", tenant="y", due=52)  # begins another life of the task
    journal.tell(53, "available", "a")
    journal.tell(54, "delivered", "a")  # waited 2 s
    journal.tell(57, "acked", "a")  # ran 3 s, took 5 s in total
    (x, y) = sorted(latency(journal.frame(spark), None).collect(), key=lambda row: str(row.tenant))
    assert (x.key, x.priority, x.tenant, x.window_start) == ("k", 5, "x", None)
    assert (x.tasks, x.deliveries, x.executions, x.clamped) == (1, 4, 3, 0)
    assert (x.queue_wait_p50, x.queue_wait_p95, x.queue_wait_max) == (2, 5, 5)
    assert (x.run_p50, x.run_p99, x.run_max) == (2, 4, 4)
    assert (x.end_to_end_p50, x.end_to_end_max) == (26, 26)
    assert (y.tenant, y.tasks, y.queue_wait_p50, y.run_p50, y.end_to_end_p50) == ("y", 1, 2, 3, 5)


def test_what_is_missing_is_not_measured(spark: SparkSession) -> None:
    """Durations with an unknown start are not measured, and negative ones count as 0 (G10)."""
    journal = SmallJournal()
    journal.tell(10, "delivered", "cut")  # the start of the task's wait is unknown
    journal.tell(13, "acked", "cut")  # ran 3 s
    journal.tell(14, "acked", "cut twice")  # only the end of this task is known
    journal.tell(20, "published", "back")
    journal.tell(18, "delivered", "back")  # waited -2 s
    journal.tell(19, "acked", "back")  # ran 1 s, took -1 s in total
    journal.tell(30, "delivered", "poison")
    journal.tell(31, "dead_lettered", "poison", reason="max_losses_exceeded")  # not an outcome
    (row,) = latency(journal.frame(spark), "1 hour").collect()
    assert row.window_start.replace(tzinfo=EPOCH.tzinfo) == EPOCH
    assert (row.tasks, row.deliveries, row.executions, row.clamped) == (4, 1, 2, 2)
    assert (row.queue_wait_max, row.run_p50, row.run_max, row.end_to_end_max) == (0, 1, 3, 0)


def _measured(rows: list[Row]) -> dict[Any, dict[str, list[float]]]:
    """Measure the durations by key, priority, tenant and minute in plain Python."""
    found: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for history in histories(rows):
        before: Row = {}
        since = birth = tenant = None
        ended = False
        for row in history:
            event, then = row["event"], row["ts"]
            born = event == "published" or (event == "retried" and before.get("state") in _OVER)
            if born:
                birth, tenant, ended = max(then, row["due_at"] or then), row["tenant"], False
            elif event == "redriven" or before.get("state") == "dead":
                ended = True
            place = (
                row["key"],
                row["priority"],
                row["tenant"] or tenant,
                then.replace(second=0, microsecond=0),
            )
            if event == "delivered" and since is not None:
                found[place]["queue_wait"].append((then - since).total_seconds())
            verdict = event in {"acked", "retried"} or (
                event == "dead_lettered" and row["reason"] == "rejected"
            )
            if verdict and before.get("event") == "delivered":
                found[place]["run"].append((then - before["ts"]).total_seconds())
            over = row["state"] in {"done", "dead", "expired", "cancelled"}
            if over and before.get("state") not in _OVER | {"dead"} and not ended:
                found[place]["tasks"].append(0.0)
                if birth is not None:
                    found[place]["end_to_end"].append((then - birth).total_seconds())
            since = then if row["state"] == "waiting" else None
            due = before.get("due_at")
            if event == "available" and due is not None and due <= then:
                since = due
            before = row
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_plain_python_measures_the_same(spark: SparkSession, seed: int) -> None:
    """For a random journal, every count, percentile and maximum equals that of a plain Python loop (G10; fault L2)."""
    journal = random_journal(seed)
    wanted = {}
    clamped = 0
    for place, durations in _measured(journal.rows).items():
        figures: list[Any] = [len(durations["tasks"])]
        for name in ("queue_wait", "run", "end_to_end"):
            values = durations[name]
            clamped += sum(value < 0 for value in values)
            spread = (
                [nearest(values, share) for share in (0.5, 0.95, 0.99, 1)] if values else [None] * 4
            )
            figures += [value if value is None else max(value, 0) for value in spread]
        wanted[place] = figures
    found = {}
    told = 0
    with compiling(spark) if seed == 2 else nullcontext():
        rows = latency(journal.frame(spark)).collect()
    for row in rows:
        place = (row.key, row.priority, row.tenant, row.window_start.replace(tzinfo=EPOCH.tzinfo))
        figures = [row.tasks]
        for name in ("queue_wait", "run", "end_to_end"):
            figures += [row[f"{name}_{figure}"] for figure in ("p50", "p95", "p99", "max")]
        found[place] = figures
        told += row.clamped
    assert found == wanted
    assert told == clamped > 0


def test_splits_and_windows(spark: SparkSession) -> None:
    """A column that is not in ``by`` is null, and invalid arguments are refused before a query runs (G10)."""
    journal = SmallJournal()
    for number in range(4):
        journal.tell(number, "published", f"t{number}", tenant=f"x{number}", priority=number)
    for number in range(4):
        journal.tell(10 * number + 10, "delivered", f"t{number}", priority=number)
    frame = journal.frame(spark)
    (row,) = latency(frame, None, by=()).collect()
    assert (row.priority, row.tenant, row.deliveries, row.queue_wait_p50) == (None, None, 4, 19)
    assert latency(frame, by=["tenant"]).dtypes == latency(frame).dtypes
    for window in ("1 fortnight", "0 seconds", "60", ""):
        with pytest.raises(InvalidInput, match="window"):
            latency(frame, window)
    with pytest.raises(InvalidInput, match="by"):
        latency(frame, by=["worker"])
    assert [seconds_of(text) for text in ("1 second", "90 seconds", "2 hours")] == [1, 90, 7200]


def test_executions_end_where_the_journal_says_so(spark: SparkSession) -> None:
    """An execution whose end is missing has no outcome, but ends at the task's next event (G10)."""
    journal = SmallJournal()
    journal.tell(0, "delivered", "a", worker="w")
    journal.tell(4, "delivered", "a", worker="w")
    journal.tell(9, "dead_lettered", "a", reason="rejected")
    journal.tell(9, "delivered", "b", worker="w")
    found = [
        (
            row.task_id,
            row.ended_by,
            row.verdict,
            row.until and row.until.replace(tzinfo=EPOCH.tzinfo),
        )
        for row in executions(journal.frame(spark)).orderBy("seq").collect()
    ]
    assert found == [
        ("a", None, False, at(4)),
        ("a", "dead_lettered", True, at(9)),
        ("b", None, False, None),
    ]


def test_no_order_is_made_over_a_whole_key(spark: SparkSession) -> None:
    """Only the events of one task are sorted, so a key with most tasks is spread over all cores (G10; fault L3)."""
    journal = SmallJournal()
    journal.tell(0, "published", "a")
    plan = plan_of(latency(journal.frame(spark)))
    windows = window_keys(plan)
    assert windows
    assert all("task_id" in keys for keys in windows)
    assert "partial_percentile_approx" in plan
