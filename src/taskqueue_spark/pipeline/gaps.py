"""Gaps and contradictions in a journal, which the numbers of its transitions show.

The transitions of a run and shard are numbered 1, 2, 3…, so a number without a row belonged to a transition that
no longer exists, and a number with different rows is a contradiction. Duplicate rows (of a copied file) count once;
damaged entries count as missing.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_spark.columns import DAMAGED, MISSING, TRANSITIONS

_MANY = 64
"""maximum number of separate gaps of a shard; if there are more, one gap from the first to the last replaces them"""
_BITS = 64
"""number of bits in each word of the bit set that records the existing numbers"""
_COUNT = ("run", "shard")
_NONE = "cast(array() as array<struct<first: bigint, last: bigint>>)"
_SO_FAR = "partition by run, shard order by word"
_BIT_SET = f"bit_or(shiftleft(1L, cast(seq & {_BITS - 1} as int)))"
_BITS_PER_WORD = {
    "bits": f"{_BIT_SET} filter (where event != 'missing')",
    "low": "min(seq) filter (where event != 'missing')",
    "high": "max(seq) filter (where event != 'missing')",
    "reported": "max(seq - 1) filter (where event = 'missing')",
    "began": "min(ts)",
    "ended": "max(ts)",
}


def gaps(transitions: DataFrame) -> DataFrame:
    """Return the ranges of missing numbers: ``run``, ``shard``, ``first``, ``last`` and their size (``missing``).

    A gap after the last number is included if the journal reports it by a row with the event `missing`.
    """
    result = _bit_words(transitions).select(*_COUNT, F.explode("holes").alias("hole"))
    missing = F.col("last") - F.col("first") + 1
    return result.select(*_COUNT, "hole.*").withColumn("missing", missing)


def contradictions(transitions: DataFrame) -> DataFrame:
    """Return each ``run``, ``shard`` and ``seq`` that is shared by transitions with different content.

    A store that was restored without its latest transitions uses their numbers again.
    """
    # Spark's hash skips nulls, so rows that differ only in which column is null would have the same hash.
    empty = (F.isnull(field.name) for field in TRANSITIONS if field.nullable)
    content = F.xxhash64(*TRANSITIONS.names, *empty)
    rows = transitions.where(~F.col("event").isin(DAMAGED, MISSING)).withColumn(
        "word", F.expr("shiftright(seq, 6)")
    )
    # Comparing contents takes far longer than counting, so compare only groups with more rows than distinct numbers.
    crowded = (
        rows.groupBy(*_COUNT, "word")
        .agg(F.count("*").alias("rows"), F.expr(_BIT_SET).alias("bits"))
        .where("rows > bit_count(bits)")
        .select(*_COUNT, "word")
    )
    return (
        rows.join(F.broadcast(crowded), [*_COUNT, "word"], "left_semi")
        .groupBy(*_COUNT, "seq")
        .agg(F.min(content).alias("low"), F.max(content).alias("high"))
        .where("low != high")
        .drop("low", "high")
    )


def spans(transitions: DataFrame) -> DataFrame:
    """Return a row per ``run`` and ``shard``: its time span, its gaps, and whether the run is over.

    ``began``, ``ended``: its first and last time. ``holes``: a sorted array of gaps (``first``, ``last``), null
    if there are none. ``over``: another run of the shard began after the last transition of this run.
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


def missing_between(low: Column, high: Column) -> Column:
    """Return whether the column ``holes`` has a missing number between two bounds. A null bound is infinite.

    The bounds are exclusive. A lower bound of 0 includes the first transition.
    """
    least, most = F.coalesce(low, F.lit(-1)), F.coalesce(high, F.lit(2**62))
    result = F.exists("holes", lambda hole: (hole["last"] > least) & (hole["first"] < most))
    return F.coalesce(result, F.expr("false"))


def missing_after(number: Column) -> Column:
    """Return the first missing number after ``number`` in the column ``holes``; null if none is missing."""
    later = F.filter("holes", lambda hole: hole["last"] > number)
    return F.array_min(F.transform(later, lambda hole: F.greatest(hole["first"], number + 1)))


def _bit_words(transitions: DataFrame) -> DataFrame:
    """Return the existing numbers as words of 64 bits, so that duplicates count once.

    ``holes``: an array of gaps (``first``, ``last``) before and within each word. For the last word, the array includes
    the gap up to the number that a row with the event `missing` reports.
    """
    return (
        transitions.where("event != 'damaged' and seq > 0")
        .groupBy(*_COUNT, F.expr("shiftright(seq, 6)").alias("word"))
        .agg(*(F.expr(text).alias(name) for name, text in _BITS_PER_WORD.items()))
        .selectExpr(
            "*",
            f"coalesce(max(high) over ({_SO_FAR} rows between unbounded preceding and 1 preceding), 0) as before",
            f"""if(lead(word) over ({_SO_FAR}) is null, coalesce(max(high) over ({_SO_FAR}), 0), null) as top""",
            f"max(reported) over ({_SO_FAR}) as behind",
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
