"""Aggregation of a batch in Spark: its transitions and the former table of live tasks give counts and the next table.

Stateful operators of Spark in Python are six times slower than a pass over a small table, and other programs cannot
read their state. Therefore the live tasks are a table, which every batch replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import or_
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_spark.columns import DAMAGED, MISSING
from taskqueue_spark.pipeline.gaps import contradictions
from taskqueue_spark.pipeline.task_steps import name_list
from taskqueue_spark.service.state import ENDS, LIVE, Position, Probe
from taskqueue_spark.service.windows import CLASSES_PER_E, LEAST

OPEN = (
    "key string, task_id string, state string, since timestamp, published_at timestamp, attempt int, "
    "tenant string, worker string, shard int, run string, seq bigint"
)
"""the schema of the table of live tasks; ``since`` is the time of the last change of state"""
_POSITIONS = pa.schema(
    [
        ("run", pa.string()),
        ("shard", pa.int32()),
        ("read", pa.int64()),
        ("heard", pa.timestamp("us", tz="UTC")),
    ]
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Read(NamedTuple):
    """A summary of the transitions of one run and shard in a batch."""

    shard: int
    run: str
    first: int
    last: int
    """the highest number of a transition, even of one that a row with the event `MISSING` reports as missing"""
    different: int
    """number of transitions, not counting duplicates"""
    since: float
    until: float
    doubled: int = 0
    """how many numbers are shared by transitions with different content"""


class Beginning(NamedTuple):
    """Facts about the first transition of a queue in a batch."""

    shard: int
    whole: bool
    """whether this transition can be the first one in the queue's history"""
    dark: bool
    """whether the settings in the batch switch the queue's journal off"""


class EventCount(NamedTuple):
    """A count of events of a queue in a window."""

    key: str
    window: int
    name: str
    position: int | None
    """the class of a duration, as in `windows.seconds_of`; ``None`` for other counts"""
    number: int


def without_known(batch: DataFrame, positions: Mapping[str, Position], ahead: float) -> DataFrame:
    """Return the transitions whose numbers have not been read before, and all damaged entries.

    A known number with a later time than all known transitions was used again. Its transition is included, unless the
    time is after ``ahead`` (Unix seconds).
    """
    if not positions:
        return batch
    runs, _, shards = zip(*(position.rpartition("/") for position in positions), strict=True)
    lasts, times = zip(
        *((item.last, _time_of(item.until)) for item in positions.values()), strict=True
    )
    columns = (runs, map(int, shards), lasts, times)
    known = pa.table([*map(pa.array, columns, _POSITIONS.types)], schema=_POSITIONS)
    read = F.broadcast(batch.sparkSession.createDataFrame(known))
    fresh = (
        (F.col("event") == DAMAGED)
        | F.col("read").isNull()
        | (F.col("seq") > F.col("read") + F.when(F.col("event") == MISSING, 1).otherwise(0))
        | ((F.col("ts") > F.col("heard")) & (F.col("ts") <= F.lit(_time_of(ahead))))
    )
    return batch.join(read, ["run", "shard"], "left").where(fresh).select(*batch.columns)


def reads(transitions: DataFrame) -> tuple[list[Read], dict[str, Beginning]]:
    """Return a summary per run and shard of a batch, ordered by time, and facts about each queue's first transition."""
    there = f"if(event != '{MISSING}', seq, null)"
    settings = "if(event = 'configured', reason, null)"
    version = f"cast(get_json_object({settings}, '$.version') as int)"
    totals = {
        "first": f"min({there})",
        "last": f"max({there})",
        "behind": f"max(if(event = '{MISSING}', seq, null))",
        "different": f"count(distinct {there})",
        "all": f"count({there})",
        "since": "unix_micros(min(ts)) / 1e6D",
        "until": "unix_micros(max(ts)) / 1e6D",
        "whole": f"min_by(event = 'published' or {version} = 1, {there})",
        "dark": f"max(get_json_object({settings}, '$.journal') = 'false')",
    }
    aggregates = (F.expr(text).alias(name) for name, text in totals.items())
    rows = transitions.groupBy("shard", "run", "key").agg(*aggregates).collect()
    of_tasks = [row for row in rows if row.first is not None]
    read: dict[tuple[int, str], Read] = {}
    for row in of_tasks:
        position = (row.shard, row.run)
        item = read.get(position, Read(*position, row.first, row.last, 0, row.since, row.until))
        read[position] = item._replace(
            first=min(item.first, row.first),
            last=max(item.last, row.last),
            # This sum is exact, because each number belongs to one queue only.
            different=item.different + row.different,
            since=min(item.since, row.since),
            until=max(item.until, row.until),
        )
    for row in rows:
        if row.behind is not None:
            position = (row.shard, row.run)
            item = read.get(position, Read(*position, row.behind, 0, 0, row.since, row.until))
            read[position] = item._replace(
                first=min(item.first, row.behind), last=max(item.last, row.behind - 1)
            )
    # Only duplicates, or a number in several queues, can be contradictions; most batches have neither.
    copied = any(row.all > row.different for row in of_tasks)
    if copied or any(item.different > item.last - item.first + 1 for item in read.values()):
        for row in contradictions(transitions).groupBy("shard", "run").count().collect():
            position = (row.shard, row.run)
            read[position] = read[position]._replace(doubled=row["count"])
    dark = {row.key for row in of_tasks if row.dark}
    begins = {
        row.key: Beginning(row.shard, bool(row.whole), row.key in dark)
        for row in sorted(of_tasks, key=lambda row: row.since, reverse=True)
        if row.key
    }
    return sorted(read.values(), key=lambda item: (item.since, item.run)), begins


def steps(transitions: DataFrame, live: DataFrame) -> DataFrame:
    """Return each transition with the former state of its task (``before``) and the start of that state (``since``).

    ``ends`` is true in a task's last row. ``live`` has the schema `OPEN`; its tasks become rows too, with ``fresh`` 0.
    A task belongs to one run: the same id in a different run is a different task.
    """
    task = "partition by key, task_id, run, shard order by fresh, seq"
    known = live.withColumnRenamed("since", "ts").selectExpr("*", "'' as event", "0 as fresh")
    fresh = (
        transitions.where("task_id != ''")
        .dropDuplicates(["shard", "run", "seq"])
        .selectExpr("*", "if(event = 'published', ts, null) as published_at", "1 as fresh")
        .select(known.columns)
    )
    return known.unionByName(fresh).selectExpr(
        "*",
        f"lag(state) over ({task}) as before",
        f"lag(ts) over ({task}) as since",
        f"last(published_at, true) over ({task} rows unbounded preceding) as birth",
        f"last(tenant, true) over ({task} rows unbounded preceding) as owner",
        f"lead(fresh) over ({task}) is null as ends",
    )


def following(result: DataFrame, current: Mapping[int, Sequence[str]]) -> DataFrame:
    """Return the live tasks after a batch, from the result of `steps`.

    ``here`` is false for tasks of a run that a later run has replaced. ``current``: the runs of each shard that may
    continue.
    """
    conditions = [
        (F.col("shard") == shard) & F.col("run").isin(*runs) for shard, runs in current.items()
    ]
    here = reduce(or_, conditions)
    return result.where(F.col("ends") & F.col("state").isin(*LIVE)).select(
        "key", "task_id", "state", F.col("ts").alias("since"), F.col("birth").alias("published_at"), "attempt",
        F.col("owner").alias("tenant"), "worker", "shard", "run", "seq", here.alias("here"),
    )  # fmt: skip


def counted(result: DataFrame, window: int, probe: Probe | None) -> list[EventCount]:
    """Return the counts of the new transitions in the result of `steps`, per key and window.

    The names of the counts are ``event:…``, ``published``, ``adopted``, ``doubled`` and the final states. ``waits`` and
    ``runs`` are counted for each class of durations. With ``probe``, ``published`` and the final states are also
    counted up to `Probe.before`, with the prefix ``low:``, and up to `Probe.after`, with the prefix ``high:``.
    """
    over = f"(before is null or before in ({name_list(ENDS)}))"
    begins = f"(event = 'published' or (event = 'retried' and {over}))"
    ended = f"state in ({name_list(ENDS)})"
    took = "(unix_micros(ts) - unix_micros(since)) / 1e6D"
    duration = f"floor(ln(greatest({took}, {LEAST}D) / {LEAST}D) * {CLASSES_PER_E}D)"
    entries = [
        _entry("concat('event:', event)"),
        _entry("'published'", begins),
        _entry("'adopted'", f"not {begins} and {over}"),
        _entry("'doubled'", f"{begins} and before in ({name_list(LIVE)})"),
        _entry("state", ended),
        _entry("'waits'", "before = 'waiting' and event = 'delivered'", duration),
        _entry("'runs'", "before = 'in_flight' and state != 'in_flight'", duration),
    ]
    if probe is not None:
        for side, limits in (("low", probe.before), ("high", probe.after)):
            of_shards = (
                (F.col("shard") == shard)
                & (F.col("run") == run)
                & (F.col("seq") <= limits.get(shard, 0))
                for shard, run in probe.runs.items()
            )
            inside = reduce(or_, of_shards, F.lit(False))  # noqa: FBT003 - the value of an SQL literal
            entries.append(F.when(inside, _entry(f"'{side}:published'", begins)))
            entries.append(F.when(inside, _entry(f"concat('{side}:', state)", ended)))
    start = F.floor(F.unix_micros("ts") / (window * 1e6)) * window
    rows = (
        result.where(F.col("fresh") == 1)
        .select(
            "key",
            start.alias("window"),
            F.explode(F.array_compact(F.array(*entries))).alias("entry"),
        )
        .groupBy("key", "window", "entry.name", "entry.place")
        .count()
        .collect()
    )
    return [EventCount(*row) for row in rows]


def _entry(name: str, condition: str = "true", position: str = "null") -> Column:
    """Return a column with the name and class of a count; null for a row that does not meet the condition."""
    entry = f"struct({name} as name, cast({position} as int) as place)"
    return F.expr(f"if({condition}, {entry}, null)")


def _time_of(seconds: float) -> datetime:
    return _EPOCH + timedelta(microseconds=round(seconds * 1e6))
