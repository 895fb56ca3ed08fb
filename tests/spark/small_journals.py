"""Small journals: written by hand, or at random with all that can go wrong in them."""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from taskqueue_spark.columns import TRANSITIONS

EPOCH = datetime(2025, 3, 1, 12, tzinfo=UTC)
Row = dict[str, Any]
STATES = {
    "published": "waiting", "available": "waiting", "delivered": "in_flight", "acked": "done", "redelivered": "waiting",
    "lost": "waiting", "retried": "scheduled", "dead_lettered": "dead", "redriven": "waiting", "discarded": "discarded",
    "expired": "expired", "cancelled": "cancelled", "configured": "", "damaged": "",
}  # fmt: skip


def at(second: float) -> datetime:
    """Return a moment so many seconds after the beginning."""
    return EPOCH + timedelta(microseconds=round(second * 1_000_000))


class SmallJournal:
    """Rows in the order in which they are told."""

    def __init__(self, key: str = "k", run: str = "r1", shard: int = 0) -> None:
        self.rows: list[Row] = []
        self.key, self.run, self.shard = key, run, shard
        self._seqs: dict[tuple[str, int], int] = defaultdict(int)

    def tell(self, second: float, event: str, task: str = "", **fields: Any) -> None:
        """Add a transition. ``due``: a second; such a task that is published is scheduled."""
        run, shard = fields.pop("run", self.run), fields.pop("shard", self.shard)
        due = fields.pop("due", None)
        self._seqs[run, shard] += 1
        row = dict.fromkeys(TRANSITIONS.names) | {
            "run": run, "shard": shard, "seq": self._seqs[run, shard], "ts": at(second),
            "event": event, "key": self.key, "task_id": task, "attempt": 1, "losses": 0,
            "priority": 5, "due_at": None if due is None else at(due),
            "state": "scheduled" if event == "published" and due is not None else STATES[event],
        }  # fmt: skip
        self.rows.append(row | fields)

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the rows as transitions."""
        return spark.createDataFrame(pa.Table.from_pylist(self.rows, schema=TRANSITIONS))


def histories(rows: list[Row]) -> Iterator[list[Row]]:
    """Give the rows of each task in each run and shard in their order, each row once."""
    found: dict[tuple[Any, ...], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if row["task_id"]:
            found[row["run"], row["shard"], row["key"], row["task_id"]][row["seq"]] = row
    for of_task in found.values():
        yield [of_task[seq] for seq in sorted(of_task)]


_AFTER = {
    "": ["published", "published", "retried"],
    "waiting": ["delivered"] * 8 + ["cancelled", "expired"],
    "in_flight": ["acked"] * 6
    + ["retried"] * 3
    + ["redelivered", "lost", "dead_lettered", "expired"],
    "scheduled": ["available"] * 5 + ["cancelled"],
    "dead": ["redriven", "discarded", "retried", ""],
    "done": ["", "", "published", "retried"],
}
_ERRORS = ["ValueError: bad number {}", "no route to 10.0.0.{}", "timeout after {} ms", None]


def random_journal(seed: int, tasks: int = 150) -> SmallJournal:
    """Make a journal of two runs, two keys, clock steps, missing and doubled rows, damage and settings."""
    chance = random.Random(seed)
    journal = SmallJournal()
    states: dict[tuple[str, str], str] = {}
    clock = 0.0
    for step in range(tasks * 12):
        clock += chance.choice([0, 0.05, 0.3, 1.0]) - (5.0 if chance.random() < 0.01 else 0)
        run = "r1" if step < tasks * 7 else "r2"
        number = chance.randrange(tasks)
        task, key = (f"t{number}", f"k{number % 2}")
        name = (run, task)
        event = chance.choice(_AFTER.get(states.get(name, ""), [""]))
        if not event:
            continue
        fields: Row = {"run": run, "shard": number % 2, "key": key, "priority": 5 + number % 3}
        if event in {"published", "retried"} and (event == "retried" or chance.random() < 0.2):
            fields["due"] = clock + chance.choice([-1, 0.5, 2])
        if event == "published":
            fields["tenant"] = chance.choice([None, "a", "b"])
        if event in {"retried", "dead_lettered"}:
            error = chance.choice(_ERRORS)
            fields["error"] = None if error is None else error.format(step % 250)
        if event == "dead_lettered":
            fields["reason"] = chance.choice(["rejected", "max_losses_exceeded"])
        if event == "delivered":
            fields["worker"] = f"w{chance.randrange(3)}"
        journal.tell(clock, event, task, **fields)
        states[name] = journal.rows[-1]["state"]
        if states[name] in {"expired", "cancelled", "discarded"}:
            states[name] = "done"
    journal.tell(clock, "damaged", reason="line 3: no JSON", key="")
    journal.tell(clock, "configured", key="k0", reason='{"weights": {"a": 2}}')
    rows = [row for row in journal.rows if chance.random() > 0.02]
    journal.rows = rows + chance.sample(rows, len(rows) // 20)
    return journal


def nearest(values: list[float], share: float) -> float:
    """Return the first value with such a share of all at or below it."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def plan_of(frame: DataFrame) -> str:
    """Return how Spark is going to do it."""
    told: str = cast("Any", frame)._jdf.queryExecution().executedPlan().toString()
    return told


def window_keys(plan: str) -> list[str]:
    """Return what each order of a plan is made within."""
    windows = [line for line in plan.splitlines() if re.match(r"[\s:+*()0-9-]*Window \[", line)]
    return [re.findall(r"\[([^\[\]]*)\]", line)[-2] for line in windows]
