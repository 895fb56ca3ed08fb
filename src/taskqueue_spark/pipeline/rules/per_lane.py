"""Rules about the order of deliveries: R7, R8, R10 and R11. Each compares the entries of one lane.

A lane is a group of entries to compare, for example those of one priority. An entry is a delivery or its end, at a
``position`` in the order of the lane.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_spark.pipeline.gaps import missing_after
from taskqueue_spark.pipeline.rules.per_task import ROUNDING
from taskqueue_spark.pipeline.task_steps import ENDED

LANE = ("run", "shard", "key", "rule", "lane")
_DUST = 1e-6
FIELDS = {
    "lane": "string",
    "part": "long",  # number of the lane's section; at most one violation is reported per section
    "position": "long",
    "step": "int",  # change in the number of tasks in flight: 1 for a delivery, -1 for an end
    "value": "long",  # number of the delivery; in lanes turn/…, number of the next missing transition
    "behind": "boolean",  # whether later entries may overtake this entry
    "limit": "double",
    "rate": "double",
    "at": "double",  # time in seconds since the limit was set
    "text": "string",
}


class LaneEntry(NamedTuple):
    """A kind of entry: the rule, the condition on a step, and the fields of the entry."""

    rule: str
    condition: Column
    fields: dict[str, Column]
    """some of `FIELDS`; all other fields are null"""


def _entry(rule: str, condition: Column, **fields: Column) -> LaneEntry:
    return LaneEntry(rule, condition, fields)


def entries() -> list[LaneEntry]:
    """Return the kinds of entries, for the rows of `steps` with the columns that `history` adds."""
    given, seq = F.col("event") == "delivered", F.col("seq")
    tenant, entity = F.coalesce("owner.tenant", F.lit("")), F.col("owner.ordering_key")
    # The first delivery of a task directly follows the event that made the task available.
    came = F.col("before_event").isin("published", "available") & (F.col("before_attempt") == 1)
    first = given & came & (F.col("attempt") == 1) & F.col("owner").isNotNull() & ~F.col("hidden")
    fair = F.coalesce(F.exists("spans.order", lambda order: order == "fair"), F.expr("false"))
    fair |= F.col("blind") | F.col("unset")
    lane = F.concat_ws("/", F.col("priority").cast("string"), F.when(fair, tenant))
    order = {"position": F.col("before_seq"), "value": seq}
    row, turn = F.concat(F.lit("order/"), entity), F.concat(F.lit("turn/"), entity)
    ended = F.col("state").isin(*ENDED) & entity.isNotNull()
    return [
        _entry("R7", first, lane=lane, behind=entity.isNotNull(), **order),
        _entry("R8", first & entity.isNotNull(), lane=row, behind=F.expr("false"), **order),
        _entry(
            "R8", given & entity.isNotNull(), lane=turn, position=seq, step=F.lit(1),
            value=missing_after(seq),
        ),
        _entry("R8", ended, lane=turn, position=seq, step=F.lit(-1)),
        *_limits("", given, F.lit("")),
        *_limits("tenant_", given & F.col("owner").isNotNull(), F.concat(F.lit("tenant/"), tenant)),
    ]  # fmt: skip


def _limits(prefix: str, given: Column, lane: Column) -> list[LaneEntry]:
    span, seq = F.col("span"), F.col("seq")
    most, rate = f"{prefix}max_inflight", f"{prefix}rate"
    ever = F.exists(f"spans.{most}", lambda limit: limit > 0)
    remaining = F.least(F.col("after_seq"), missing_after(seq))
    # Tasks that a tenant had in flight when its limit was set do not count towards the limit.
    held = F.concat(lane, F.lit("/"), span["seq"].cast("string")) if prefix else lane
    limited = given & (span[most] > 0 if prefix else ever)
    part = {"part": span["seq"]}
    limit = F.when((span[most] > 0) & ~F.col("blind"), span[most])
    at = (F.unix_micros("ts") - F.unix_micros(span["ts"])) / 1e6
    spent = F.concat(lane, F.lit("/"), span["seq"].cast("string"))
    return [
        _entry("R10", limited, lane=held, position=seq, step=F.lit(1), limit=limit, **part),
        _entry("R10", limited & remaining.isNotNull(), lane=held, position=remaining, step=F.lit(-1)),
        _entry(
            "R11", given & (span[rate] > 0) & ~F.col("blind"), lane=spent, position=seq, step=F.lit(1),
            limit=span[f"{prefix}burst"], rate=span[rate], at=at, **part,
        ),
    ]  # fmt: skip


def broken(result: DataFrame) -> DataFrame:
    """Return the entries that break their rule, with a ``text``. An entry that already has a text is included too."""
    lane = f"partition by {', '.join(LANE)} order by position, step"
    before, until = (
        f"{lane} rows between unbounded preceding and 1 preceding",
        f"{lane} rows unbounded preceding",
    )
    taken = """step = 1 and startswith(lane, 'turn/') and _held.task_id != task_id
        and coalesce(_released < _held.position, true) and not coalesce(_held.value < position, false)"""
    text = f"""coalesce(
        text,
        if(rule in ('R7', 'R8') and _earlier > value, 'delivered before a task that was available earlier', null),
        if(rule = 'R8' and {taken}, concat('delivered before the end of ', _held.task_id), null),
        if(rule = 'R10' and step = 1 and _running > `limit`, concat(cast(_running as string), ' in flight'), null),
        if(rule = 'R11' and _level > `limit` + rate * {ROUNDING} + {_DUST}D,
            concat('a burst of ', cast(round(_level, 2) as string)), null))"""
    return (
        result.selectExpr(
            "*",
            f"max(if(not behind, value, null)) over ({before}) as _earlier",
            f"sum(step) over ({until}) as _running",
            f"row_number() over ({lane}) as _number",
            f"max(if(step = 1, struct(position, task_id, value), null)) over ({before}) as _held",
        )
        .selectExpr(
            "*",
            f"max(if(step = -1 and task_id = _held.task_id, position, null)) over ({before}) as _released",
            f"_number - rate * at + max(rate * at - _number + 1) over ({until}) as _level",
        )
        .selectExpr("* except (text)", f"{text} as text")
        .where("text is not null")
    )
