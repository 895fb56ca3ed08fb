"""What is missing in a journal, by its numbers.

Within a run and shard the transitions are numbered 1, 2, 3…: a number that is not there is a transition that nobody can
tell of any more. Rows that are there twice (a copied file) count once; what is `damaged` counts as missing.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

__all__ = ["Holes", "gaps", "spans"]

_MANY = 64
"""holes of a shard that are told apart; where there are more they are one, from the first to the last"""
_COUNT = ("run", "shard")


def gaps(transitions: DataFrame) -> DataFrame:
    """Return the numbers that are missing: ``run``, ``shard``, ``first``, ``last`` and how many (``missing``).

    What is missing behind the last number that is there cannot be seen.
    """
    buckets = _buckets(transitions)
    between = buckets.select(*_COUNT, "before", F.col("low").alias("at")).where(_lacking())
    both = between.unionByName(_within(transitions, buckets))
    hole = _hole(F.col("before"), F.col("at"))
    missing = F.col("last") - F.col("first") + 1
    return (
        both.select(*_COUNT, hole.alias("hole"))
        .select(*_COUNT, "hole.*")
        .withColumn("missing", missing)
    )


def spans(transitions: DataFrame) -> DataFrame:
    """Return a row per ``run`` and ``shard``: since when and until when it tells, its holes, and whether it is over.

    ``began``, ``ended``: its first and last time. ``holes``: an array of ``first`` and ``last``, sorted, null where
    nothing is missing. ``over``: another run of the shard began after all that this one tells.
    """
    buckets = _buckets(transitions)
    hole = F.when(F.col("low") > F.col("before") + 1, _hole(F.col("before"), F.col("low")))
    known = buckets.groupBy(*_COUNT).agg(
        F.min("began").alias("began"),
        F.max("ended").alias("ended"),
        F.collect_list(hole).alias("between"),
    )
    following = F.lead("began").over(Window.partitionBy("shard").orderBy("began", "run"))
    within = _within(transitions, buckets).groupBy(*_COUNT)
    inner = within.agg(F.collect_list(_hole(F.col("before"), F.col("at"))).alias("within"))
    known = known.withColumn("over", F.coalesce(following >= F.col("ended"), F.expr("false")))
    both = F.sort_array(F.coalesce(F.concat("between", "within"), "between"))
    holes = known.join(inner, [*_COUNT], "left").withColumn("holes", both)
    covering = F.struct(
        F.col("holes")[0]["first"].alias("first"), F.array_max("holes.last").alias("last")
    )
    few = F.when(F.size("holes") > _MANY, F.array(covering)).when(
        F.size("holes") > 0, F.col("holes")
    )
    return holes.select(*_COUNT, "began", "ended", "over", few.alias("holes"))


class Holes:
    """Questions to the column ``holes`` of `spans`."""

    @staticmethod
    def between(low: Column, high: Column) -> Column:
        """Whether anything is missing behind one number and before another; each may be null, for no bound.

        What was before number 1 has the number 0.
        """
        least, most = F.coalesce(low, F.lit(-1)), F.coalesce(high, F.lit(2**62))
        found = F.exists("holes", lambda hole: (hole["last"] > least) & (hole["first"] < most))
        return F.coalesce(found, F.expr("false"))

    @staticmethod
    def after(number: Column) -> Column:
        """Return the first number behind one that may be missing; null where none is."""
        later = F.filter("holes", lambda hole: hole["last"] > number)
        return F.array_min(F.transform(later, lambda hole: F.greatest(hole["first"], number + 1)))


def _buckets(transitions: DataFrame) -> DataFrame:
    """Return what is there, by the thousands: counted without sorting, and once each; and the number before it."""
    seq = F.col("seq")
    there = F.bitmap_count(F.bitmap_construct_agg(F.bitmap_bit_position(seq)))
    counted = (
        _numbered(transitions)
        .groupBy(*_COUNT, "bucket")
        .agg(
            F.min("seq").alias("low"),
            F.max("seq").alias("high"),
            there.alias("there"),
            F.min("ts").alias("began"),
            F.max("ts").alias("ended"),
        )
    )
    before = F.lag("high").over(Window.partitionBy(*_COUNT).orderBy("bucket"))
    return counted.withColumn("before", F.coalesce(before, F.lit(0)))


def _numbered(transitions: DataFrame) -> DataFrame:
    sound = transitions.where((F.col("event") != "damaged") & (F.col("seq") > 0))
    return sound.select(*_COUNT, "seq", "ts", F.bitmap_bucket_number(F.col("seq")).alias("bucket"))


def _within(transitions: DataFrame, buckets: DataFrame) -> DataFrame:
    """Return the numbers (``at``) before which some are missing, within the buckets that lack any."""
    names = [*_COUNT, "bucket"]
    holed = buckets.where(F.col("there") < F.col("high") - F.col("low") + 1).select(*names)
    before = F.lag("seq").over(Window.partitionBy(*names).orderBy("seq"))
    found = _numbered(transitions).join(F.broadcast(holed), names, "left_semi")
    return found.select(*_COUNT, before.alias("before"), F.col("seq").alias("at")).where(_lacking())


def _lacking() -> Column:
    return F.col("at") > F.col("before") + 1


def _hole(before: Column, at: Column) -> Column:
    return F.struct((before + 1).alias("first"), (at - 1).alias("last"))
