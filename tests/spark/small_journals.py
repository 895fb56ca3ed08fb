"""Small journals, written by hand or generated at random with all kinds of faults."""

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
    "lost": "waiting", "retried": "scheduled", "rescheduled": "scheduled", "dead_lettered": "dead",
    "redriven": "waiting", "replaced": "waiting", "discarded": "discarded", "released": "waiting",
    "expired": "expired", "cancelled": "cancelled", "configured": "", "damaged": "",
}  # fmt: skip


def at(second: float) -> datetime:
    """Return the time ``second`` seconds after the start of the journal."""
    return EPOCH + timedelta(microseconds=round(second * 1_000_000))


class SmallJournal:
    """A journal as a list of rows, in the order in which they were added."""

    def __init__(self, key: str = "k", run: str = "r1", shard: int = 0) -> None:
        self.rows: list[Row] = []
        self.key, self.run, self.shard = key, run, shard
        self._seqs: dict[tuple[str, int], int] = defaultdict(int)

    def tell(self, second: float, event: str, task: str = "", **fields: Any) -> None:
        """Add a transition. ``due`` is in seconds; a published task with it is scheduled."""
        run, shard = fields.pop("run", self.run), fields.pop("shard", self.shard)
        due = fields.pop("due", None)
        self._seqs[run, shard] += 1
        row = dict.fromkeys(TRANSITIONS.names) | {
            "run": run, "shard": shard, "seq": self._seqs[run, shard], "ts": at(second),
            "event": event, "key": self.key, "task_id": task, "attempt": 1, "losses": 0,
            "priority": 5, "due_at": None if due is None else at(due),
            "state": "scheduled" if event in {"published", "replaced"} and due is not None else STATES[event],
        }  # fmt: skip
        self.rows.append(row | fields)

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the rows as a Spark data frame of transitions."""
        return spark.createDataFrame(pa.Table.from_pylist(self.rows, schema=TRANSITIONS))


def histories(rows: list[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each task in each run and shard, in order and without duplicates."""
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
    """Generate a journal with two runs, two keys, clock steps, missing and duplicated rows, damage and settings."""
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
    """Return the smallest value such that at least this share of all values is not greater."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def plan_of(frame: DataFrame) -> str:
    """Return Spark's physical plan of a query."""
    told: str = cast("Any", frame)._jdf.queryExecution().executedPlan().toString()
    return told


def window_keys(plan: str) -> list[str]:
    """Return the partition keys of each window operation in a physical plan."""
    windows = [line for line in plan.splitlines() if re.match(r"[\s:+*()0-9-]*Window \[", line)]
    return [re.findall(r"\[([^\[\]]*)\]", line)[-2] for line in windows]
