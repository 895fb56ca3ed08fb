"""Tests of the fairness between tenants and between workers."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from datetime import datetime
from typing import Any

import pytest
from pyspark.sql import SparkSession

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.pipeline.fairness import fairness
from tests.spark.small_journals import (
    EPOCH,
    Row,
    SmallJournal,
    histories,
    plan_of,
    random_journal,
    window_keys,
)


def _serve(journal: SmallJournal, key: str, order: str, workers: str = "v") -> None:
    """Publish a backlog of the tenants a and b, and deliver it in the given order.

    A task goes to the next worker every ten seconds.
    """
    journal.key = key
    for number in range(30):
        for tenant in "ab":
            journal.tell(0.001 * number, "published", f"{tenant}{number}", tenant=tenant)
    given: Counter[str] = Counter()
    for place, (tenant, worker) in enumerate(zip(order, itertools.cycle(workers), strict=False)):
        task = f"{tenant}{given[tenant]}"
        given[tenant] += 1
        journal.tell(10 * place + 5, "delivered", task, worker=worker)


def _shares(shares: list[Any]) -> dict[str, tuple[int, float]]:
    return {share.member: (share.deliveries, round(share.share, 6)) for share in shares}


def test_by_hand(spark: SparkSession) -> None:
    """Equal turns give the index 1, and one of two tenants getting everything gives 1/2.

    Weights and starving tenants count (G10).
    """
    journal = SmallJournal()
    journal.tell(0, "configured", key="weights", reason='{"weights":{"b":9}}')
    journal.tell(1, "configured", key="weights", reason='{"order":"fair","weights":{"a":2.0}}')
    journal.tell(1, "damaged", key="", reason="torn")
    # two fair minutes, then tenant b is starved
    _serve(journal, "turns", "ab" * 6 + "a" * 12, "vw")
    _serve(journal, "weights", "aab" * 8)
    _serve(journal, "workers", "ab" * 15, "vwvwvw" + "v" * 12 + "vwvwvwvwvwvw")
    journal.key = "idle"
    for number in range(20):
        tenant = "a" if number % 4 else None
        journal.tell(30 * number, "published", f"t{number}", tenant=tenant)
        journal.tell(30 * number + 1, "delivered", f"t{number}", worker="v")
    frame = journal.frame(spark)

    rows = {row.key: row for row in fairness(frame).collect()}
    assert set(rows) == {"turns", "weights", "workers", "idle"}
    # no task is waiting when the first minute begins, so that minute does not count
    row = rows["turns"]
    assert (row.windows, row.jain, row.jain_lowest) == (3, pytest.approx(2 / 3), 0.5)
    assert _shares(row.shares) == {"a": (15, round(15 / 18, 6)), "b": (3, round(3 / 18, 6))}
    assert (row.members, row.deliveries) == (2, 24)
    assert row.jain_total == pytest.approx(24**2 / (2 * (18**2 + 6**2)))
    assert _shares(row.shares_total) == {"a": (18, 0.75), "b": (6, 0.25)}
    row = rows["weights"]
    assert (row.windows, row.jain, row.jain_total) == (3, pytest.approx(1), pytest.approx(1))
    row = rows["idle"]
    assert (row.windows, row.jain, row.jain_lowest, row.shares) == (0, None, None, [])
    assert _shares(row.shares_total) == {"a": (15, 0.75), "": (5, 0.25)}

    rows = {row.key: row for row in fairness(frame, "worker").collect()}
    # the first minute in which the workers start and the last one in which they stop do not count
    row = rows["workers"]
    assert (row.windows, row.jain_lowest) == (3, 0.5)
    assert row.jain == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert _shares(row.shares) == {"v": (15, round(15 / 18, 6)), "w": (3, round(3 / 18, 6))}
    row = rows["idle"]
    assert (row.windows, row.members, row.jain_total) == (0, 1, 1)


def _place(moment: datetime, length: int) -> int:
    return int((moment - EPOCH).total_seconds() // length)


def _spans(rows: list[Row], length: int) -> tuple[dict[Any, list[tuple[int, int]]], Counter[Any]]:
    """Return the window ranges in which tasks of each key and tenant waited, and the deliveries by window."""
    heard: dict[str, datetime] = {}
    for row in rows:
        heard[row["run"]] = max(row["ts"], heard.get(row["run"], row["ts"]))
    spans, served = defaultdict(list), Counter[Any]()
    for history in histories(rows):
        tenant: str | None = None
        before: Row = {}
        for row, after in zip(history, [*history[1:], None], strict=True):
            ended = before.get("state", "") in {"done", "expired", "cancelled", "discarded"}
            if row["event"] == "published" or (row["event"] == "retried" and ended):
                tenant = row["tenant"]
            name = (row["key"], row["tenant"] or tenant or "")
            served[*name, _place(row["ts"], length)] += row["event"] == "delivered"
            if row["state"] == "waiting":
                due = before.get("due_at") or row["ts"]
                since = min(due, row["ts"]) if row["event"] == "available" else row["ts"]
                until = heard[row["run"]] if after is None else after["ts"]
                spans[name].append((_place(since, length), _place(max(since, until), length)))
            before = row
    return spans, served


def _contended(rows: list[Row], length: int) -> dict[str, tuple[int, float, float]]:
    """Compute the contended windows and indexes of each key in plain Python."""
    spans, served = _spans(rows, length)
    indexes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for key, window in itertools.product(sorted({key for key, _ in spans}), range(-20, 2000)):
        here = [
            name
            for name in spans
            if name[0] == key
            # tasks of the tenant were waiting at the window's start
            and any(begin < window <= end for begin, end in spans[name])
            and any(begin <= window < end for begin, end in spans[name])  # and at its end
        ]
        weights = [2 if name == ("k0", "a") else 1 for name in here]
        got = [served[*name, window] / weight for name, weight in zip(here, weights, strict=True)]
        given = sum(served[*name, window] for name in here)
        if len(got) > 1 and given >= len(got):
            index = sum(got) ** 2 / (len(got) * sum(x * x for x in got))
            indexes[key].append((index, given))
    return {
        key: (
            len(found),
            round(
                sum(index * given for index, given in found) / sum(given for _, given in found), 9
            ),
            round(min(index for index, _ in found), 9),
        )
        for key, found in indexes.items()
    }


@pytest.mark.usefixtures("compiled")
def test_plain_python_finds_the_same_windows(spark: SparkSession) -> None:
    """For a random journal, the contended windows and indexes equal those computed in plain Python (G10; fault L2)."""
    journal = random_journal(5)
    found = {
        row.key: (row.windows, round(row.jain, 9), round(row.jain_lowest, 9))
        for row in fairness(journal.frame(spark), window="5 seconds").collect()
    }
    assert found == _contended(journal.rows, 5)


def test_members_are_put_in_order_once_they_are_summed_up(spark: SparkSession) -> None:
    """Only the events of one task are sorted before aggregation, and an invalid ``by`` is refused (G10; fault L3)."""
    journal = SmallJournal()
    journal.tell(0, "published", "a")
    journal.tell(1, "delivered", "a")
    frame = journal.frame(spark)
    for by in ("tenant", "worker"):
        plan = plan_of(fairness(frame, by))
        orders = window_keys(plan)
        assert len(orders) > 2
        assert all(
            "task_id" in keys or "partial_sum" in plan[plan.index(keys) :] for keys in orders
        )
    with pytest.raises(InvalidInput, match="by"):
        fairness(frame, "key")
