"""The digests of a journal, which show changes that leave consistent numbers and histories.

The digest of a transition depends on the transition and on the digest before it. So each is checked with the one before
it alone, on all machines at once. Both backends write digests if their setting ``journal_digests`` is true.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_spark.columns import DAMAGED, MISSING

_SHOWN = 20
_MOST_ENDS = 1000
_NUMBER = ("run", "shard", "seq")
_CHANGE = (
    "event", "key", "state", "worker", "reason", "task_id", "attempt", "losses", "priority", "tenant", "ordering_key",
    "unix_micros(due_at)", "error",
)  # fmt: skip
_EXPECTED = f"""sha1(concat_ws('\\0', before, seq, unix_micros(ts),
    {", ".join(f"coalesce(cast({text} as string), '')" for text in _CHANGE)}))"""


class DigestCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check."""

    transitions: int
    """number of transitions with a digest"""
    altered: int
    """number of digests that do not match: the transition or the one before it was changed, removed or renumbered"""
    first: list[dict[str, Any]]
    """``run``, ``shard`` and ``seq`` of the first of these transitions"""
    ends: list[dict[str, Any]]
    """``run``, ``shard``, and the last ``seq`` and ``digest``, which identifies the whole journal up to there. Compare
    it with a copy that is kept elsewhere. If there are more than 1000, only the latest runs are listed."""
    unfinished: int
    """number of runs with digests, per shard, that have no end mark: they continue, were killed, or were cut off"""


def check_digests(transitions: DataFrame) -> DigestCheck | None:
    """Check the digests of a journal. Return ``None`` if it has none.

    A transition after a gap is not compared, because the gap is reported anyway.
    """
    rows = transitions.where(~F.col("event").isin(DAMAGED, MISSING))
    noted = rows.where("digest is not null")
    if noted.isEmpty():
        return None
    previous = rows.selectExpr(
        "run", "shard", "seq + 1 as seq", "coalesce(digest, run) as before"
    ).distinct()
    checked = (
        noted.join(previous, [*_NUMBER], "left")
        .withColumn("before", F.expr("coalesce(before, if(seq = 1, run, null))"))
        .withColumn("altered", F.expr(f"before is not null and digest != {_EXPECTED}"))
    )
    counted = checked.agg(
        F.count_distinct(*_NUMBER).alias("transitions"),
        F.count_distinct(*(F.when(F.col("altered"), F.col(name)) for name in _NUMBER)).alias(
            "altered"
        ),
    )
    numbers = counted.toArrow().to_pylist()[0]
    first = checked.where("altered").select(*_NUMBER).distinct().orderBy(*_NUMBER)
    ends = (
        rows.groupBy("run", "shard")
        .agg(
            F.max("seq").alias("seq"),
            F.max_by(F.struct("digest", "event"), "seq").alias("last"),
            F.max("ts").alias("ended"),
            F.max("digest").alias("any"),
        )
        .where("any is not null")
    )
    return DigestCheck(
        **numbers,
        first=first.limit(_SHOWN).toArrow().to_pylist() if numbers["altered"] else [],
        ends=ends.orderBy(F.desc("ended"), "run", "shard")
        .selectExpr("run", "shard", "seq", "last.digest as digest")
        .limit(_MOST_ENDS)
        .toArrow()
        .to_pylist(),
        unfinished=ends.where("last.event != 'closed'").count(),
    )
