"""Tests of the counts of events over time, and of the concurrency."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
from pyspark.sql import SparkSession

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.columns import TASK_EVENTS
from taskqueue_spark.pipeline.throughput import concurrency, throughput
from tests.spark.small_journals import (
    EPOCH,
    Row,
    SmallJournal,
    at,
    histories,
    plan_of,
    random_journal,
    window_keys,
)


def test_counts_by_hand(spark: SparkSession) -> None:
    """Events are counted per window and per second; settings and damage do not count (G10)."""
    journal = SmallJournal()
    journal.tell(0, "configured", reason="{}")
    for second, event in [
        (1, "published"),
        (2, "delivered"),
        (3, "lost"),
        (59, "delivered"),
        (60, "retried"),
    ]:
        journal.tell(second, event, "a")
    journal.tell(90, "dead_lettered", "b", reason="max_losses_exceeded")
    journal.tell(119, "dead_lettered", "c", reason="rejected")
    journal.tell(119, "damaged", reason="torn")
    first, later = throughput(journal.frame(spark)).orderBy("window_start").collect()
    assert first.window_start.replace(tzinfo=EPOCH.tzinfo) == EPOCH
    assert (first.published, first.delivered, first.lost, first.retried, first.poisoned) == (
        1,
        2,
        1,
        0,
        0,
    )
    assert (first.seconds, first.delivered_per_second) == (60, 2 / 60)
    assert (later.retried, later.dead_lettered, later.poisoned) == (1, 2, 1)
    (whole,) = throughput(journal.frame(spark), None).collect()
    assert (whole.window_start, whole.seconds, whole.delivered_per_second) == (None, 118, 2 / 118)


@pytest.mark.usefixtures("compiled")
def test_plain_python_counts_the_same(spark: SparkSession) -> None:
    """For a random journal, all counts equal a plain Python loop's, and repeated rows count once (G10; fault L2)."""
    journal = random_journal(3)
    wanted: Counter[Any] = Counter(
        (row["key"], row["ts"].replace(second=0, microsecond=0), row["event"])
        for row in journal.rows
        if row["task_id"]
    )
    found = {
        (row.key, row.window_start.replace(tzinfo=EPOCH.tzinfo), event): row[event]
        for row in throughput(journal.frame(spark)).collect()
        for event in TASK_EVENTS
        if row[event]
    }
    assert found == wanted


def test_concurrency_by_hand(spark: SparkSession) -> None:
    """Overlapping executions are counted over time, and one that ends when another begins does not overlap it (G10)."""
    journal = SmallJournal()
    for task, begin, end in [("a", 0, 50), ("b", 10, 20), ("c", 20, 30), ("d", 95, 100)]:
        journal.tell(begin, "delivered", task, worker="v" if task in "ad" else "w")
        journal.tell(end, "acked", task)
    journal.tell(100, "delivered", "open", worker="w")
    (row,) = concurrency(journal.frame(spark), step="7 seconds").collect()
    assert (row.key, row.worker, row.executions, row.peak) == ("k", None, 5, 2)
    assert row.mean == pytest.approx((50 + 10 + 10 + 5) / 100)
    assert row.p99 == 2
    assert [moment.replace(tzinfo=EPOCH.tzinfo) for moment in (row.since, row.until)] == [
        at(0),
        at(100),
    ]
    by = {row.worker: row for row in concurrency(journal.frame(spark), "worker").collect()}
    assert (by["v"].executions, by["v"].peak, by["v"].mean) == (2, 1, pytest.approx(0.55))
    assert (by["w"].executions, by["w"].peak, by["w"].p99) == (3, 1, 1)


def _levels(rows: list[Row]) -> dict[str, tuple[int, int, float, int]]:
    """Compute the levels at every moment of each key in plain Python."""
    heard: dict[str, Any] = {}
    for row in rows:
        heard[row["run"]] = max(row["ts"], heard.get(row["run"], row["ts"]))
    spans = defaultdict(list)
    for history in histories(rows):
        for row, after in zip(history, [*history[1:], None], strict=True):
            if row["event"] == "delivered":
                end = heard[row["run"]] if after is None else after["ts"]
                spans[row["key"]].append((row["ts"], max(row["ts"], end)))
    found = {}
    for key, of_key in spans.items():
        moments = sorted({moment for span in of_key for moment in span})
        held: Counter[int] = Counter()
        for now, following in pairwise(moments):
            level = sum(begin <= now < end for begin, end in of_key)
            held[level] += round((following - now).total_seconds() * 1_000_000)
        total = held.total()
        upto = 0
        for level in sorted(held):
            upto += held[level]
            if upto >= 0.99 * total:
                break
        mean = sum(level * length for level, length in held.items()) / total
        found[key] = (len(of_key), max(held), round(mean, 9), level)
    return found


@pytest.mark.usefixtures("compiled")
def test_plain_python_finds_the_same_levels(spark: SparkSession) -> None:
    """For a random journal, peak, mean and p99 equal those of plain Python for any step (G10; fault L2)."""
    journal = random_journal(4)
    for step in ("3 seconds", "1 hour"):
        found = {
            row.key: (row.executions, row.peak, round(row["mean"], 9), row.p99)
            for row in concurrency(journal.frame(spark), step=step).collect()
        }
        assert found == _levels(journal.rows)


def test_a_busy_key_is_put_in_order_step_by_step(spark: SparkSession) -> None:
    """Before aggregation, rows are sorted within one step of a key, never within a whole key (G10; fault L3)."""
    journal = SmallJournal()
    journal.tell(0, "delivered", "a")
    counted = plan_of(throughput(journal.frame(spark)))
    assert "partial_count" in counted
    assert not window_keys(counted)
    plan = plan_of(concurrency(journal.frame(spark)))
    orders = window_keys(plan)
    assert len(orders) > 2
    rows = [keys for keys in orders if "task_id" not in keys and "step" not in keys]
    assert all("partial_sum" in plan[plan.index(keys) :] for keys in rows)


def test_nonsense_is_refused(spark: SparkSession) -> None:
    """An invalid window or ``by`` raises an error that names it (G10)."""
    frame = SmallJournal().frame(spark)
    with pytest.raises(InvalidInput, match="window"):
        throughput(frame, "late")
    with pytest.raises(InvalidInput, match="by"):
        concurrency(frame, "tenant")
