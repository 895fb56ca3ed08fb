"""What is missing in a journal, by its numbers.

Within a run and shard the transitions are numbered 1, 2, 3…: a number that is not there is a transition that nobody can
tell of any more. Rows that are there twice (a copied file) count once; what is `damaged` counts as missing.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

_MANY = 64
"""holes of a shard that are told apart; where there are more they are one, from the first to the last"""
_BITS = 64
"""of a word"""
_COUNT = ("run", "shard")
_NONE = "cast(array() as array<struct<first: bigint, last: bigint>>)"
_SO_FAR = "partition by run, shard order by word"
_BITS_PER_WORD = {
    "bits": f"bit_or(shiftleft(1L, cast(seq & {_BITS - 1} as int))) filter (where event != 'missing')",
    "low": "min(seq) filter (where event != 'missing')",
    "high": "max(seq) filter (where event != 'missing')",
    "told": "max(seq - 1) filter (where event = 'missing')",
    "began": "min(ts)",
    "ended": "max(ts)",
}


def gaps(transitions: DataFrame) -> DataFrame:
    """Return the numbers that are missing: ``run``, ``shard``, ``first``, ``last`` and how many (``missing``).

    What is missing behind the last number that is there is seen where a row `missing` tells of it.
    """
    result = _bit_words(transitions).select(*_COUNT, F.explode("holes").alias("hole"))
    missing = F.col("last") - F.col("first") + 1
    return result.select(*_COUNT, "hole.*").withColumn("missing", missing)


def spans(transitions: DataFrame) -> DataFrame:
    """Return a row per ``run`` and ``shard``: since when and until when it tells, its holes, and whether it is over.

    ``began``, ``ended``: its first and last time. ``holes``: an array of ``first`` and ``last``, sorted, null where
    nothing is missing. ``over``: another run of the shard began after all that this one tells.
    """
    later = (
        "partition by shard order by began, run rows between 1 following and unbounded following"
    )
    covering = "array(named_struct('first', all[0].first, 'last', array_max(all.last)))"
    return (
        _bit_words(transitions)
        .groupBy(*_COUNT)
        .agg(F.expr("min(began)").alias("began"), F.expr("max(ended)").alias("ended"),
             F.expr("sort_array(flatten(collect_list(holes)))").alias("all"))
        .selectExpr(
            *_COUNT, "began", "ended",
            f"coalesce(max(began) over ({later}) >= ended, false) as over",
            f"case when size(all) > {_MANY} then {covering} when size(all) > 0 then all end as holes",
        )
    )  # fmt: skip


class Holes:
    """Questions to the column ``holes`` of `spans`."""

    @staticmethod
    def between(low: Column, high: Column) -> Column:
        """Whether anything is missing behind one number and before another; each may be null, for no bound.

        What was before number 1 has the number 0.
        """
        least, most = F.coalesce(low, F.lit(-1)), F.coalesce(high, F.lit(2**62))
        result = F.exists("holes", lambda hole: (hole["last"] > least) & (hole["first"] < most))
        return F.coalesce(result, F.expr("false"))

    @staticmethod
    def after(number: Column) -> Column:
        """Return the first number behind one that may be missing; null where none is."""
        later = F.filter("holes", lambda hole: hole["last"] > number)
        return F.array_min(F.transform(later, lambda hole: F.greatest(hole["first"], number + 1)))


def _bit_words(transitions: DataFrame) -> DataFrame:
    """Return what is there by words of 64 numbers, a bit for each, so that what is there twice counts once.

    ``holes``: what is missing before and within each, and behind the last of them as far as rows `missing` tell: an
    array of ``first`` and ``last``. Such a row is there instead of what stands before its number.
    """
    return (
        transitions.where("event != 'damaged' and seq > 0")
        .groupBy(*_COUNT, F.expr("shiftright(seq, 6)").alias("word"))
        .agg(*(F.expr(text).alias(name) for name, text in _BITS_PER_WORD.items()))
        .selectExpr(
            "*",
            f"coalesce(max(high) over ({_SO_FAR} rows between unbounded preceding and 1 preceding), 0) as before",
            f"""if(lead(word) over ({_SO_FAR}) is null, coalesce(max(high) over ({_SO_FAR}), 0), null) as top""",
            f"max(told) over ({_SO_FAR}) as behind",
            f"""if(bit_count(bits) < high - low + 1,
                filter(sequence(0, {_BITS - 1}), place -> (shiftright(bits, place) & 1) = 1), null) as there""",
        )
        .selectExpr(
            *_COUNT, "began", "ended",
            f"""concat(
                {_hole("low > before + 1", "before + 1", "low - 1")},
                coalesce(filter(
                    zip_with(there, slice(there, 2, size(there)), (one, two) -> named_struct(
                        'first', word * {_BITS} + one + 1, 'last', word * {_BITS} + two - 1)),
                    hole -> hole.first <= hole.last), {_NONE}),
                {_hole("behind > top", "top + 1", "behind")}) as holes""",
        )
    )  # fmt: skip


def _hole(condition: str, first: str, last: str) -> str:
    return f"if({condition}, array(named_struct('first', {first}, 'last', {last})), {_NONE})"
