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
_BITS = 64
"""of a word"""
_COUNT = ("run", "shard")


def gaps(transitions: DataFrame) -> DataFrame:
    """Return the numbers that are missing: ``run``, ``shard``, ``first``, ``last`` and how many (``missing``).

    What is missing behind the last number that is there cannot be seen.
    """
    found = _words(transitions).select(*_COUNT, F.explode("holes").alias("hole"))
    missing = F.col("last") - F.col("first") + 1
    return found.select(*_COUNT, "hole.*").withColumn("missing", missing)


def spans(transitions: DataFrame) -> DataFrame:
    """Return a row per ``run`` and ``shard``: since when and until when it tells, its holes, and whether it is over.

    ``began``, ``ended``: its first and last time. ``holes``: an array of ``first`` and ``last``, sorted, null where
    nothing is missing. ``over``: another run of the shard began after all that this one tells.
    """
    known = _words(transitions).groupBy(*_COUNT).agg(
        F.min("began").alias("began"),
        F.max("ended").alias("ended"),
        F.sort_array(F.flatten(F.collect_list("holes"))).alias("all"),
    )  # fmt: skip
    following = F.lead("began").over(Window.partitionBy("shard").orderBy("began", "run"))
    covering = F.struct(
        F.col("all")[0]["first"].alias("first"), F.array_max("all.last").alias("last")
    )
    few = F.when(F.size("all") > _MANY, F.array(covering)).when(F.size("all") > 0, F.col("all"))
    over = F.coalesce(following >= F.col("ended"), F.expr("false"))
    return known.select(*_COUNT, "began", "ended", over.alias("over"), few.alias("holes"))


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


def _words(transitions: DataFrame) -> DataFrame:
    """Return what is there by words of 64 numbers, a bit for each, so that what is there twice counts once.

    ``holes``: what is missing before and within each, an array of ``first`` and ``last``.
    """
    sound = transitions.where((F.col("event") != "damaged") & (F.col("seq") > 0))
    words = sound.groupBy(*_COUNT, F.shiftright("seq", 6).alias("word")).agg(
        F.bit_or(F.expr(f"shiftleft(1L, cast(seq & {_BITS - 1} as int))")).alias("bits"),
        F.min("seq").alias("low"),
        F.max("seq").alias("high"),
        F.min("ts").alias("began"),
        F.max("ts").alias("ended"),
    )
    before = F.coalesce(F.lag("high").over(Window.partitionBy(*_COUNT).orderBy("word")), F.lit(0))
    start = F.col("word") * _BITS
    there = F.expr(f"filter(sequence(0, {_BITS - 1}), place -> (shiftright(bits, place) & 1) = 1)")
    pairs = F.zip_with(
        F.col("there"),
        F.expr("slice(there, 2, size(there))"),
        lambda one, two: F.struct(
            (start + one + 1).alias("first"), (start + two - 1).alias("last")
        ),
    )
    inner = F.filter(pairs, lambda hole: hole["first"] <= hole["last"])
    holed = F.bit_count("bits") < F.col("high") - F.col("low") + 1
    none = F.expr("cast(array() as array<struct<first: bigint, last: bigint>>)")
    outer = F.struct((F.col("before") + 1).alias("first"), (F.col("low") - 1).alias("last"))
    gap = F.when(F.col("low") > F.col("before") + 1, F.array(outer)).otherwise(none)
    holes = F.concat(gap, F.when(holed, inner).otherwise(none))
    return (
        words.withColumn("before", before)
        .withColumn("there", F.when(holed, there))
        .select(*_COUNT, "began", "ended", holes.alias("holes"))
    )
