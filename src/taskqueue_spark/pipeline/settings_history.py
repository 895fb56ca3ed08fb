"""The settings of queues that the journal records, and the times when a queue wrote no journal."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_core.rate_limit import IntervalUnit

_RATE = "struct<max_tokens: double, interval: double, interval_unit: string>"
_SETTINGS = f"""
    version int, journal boolean, max_losses int, dedupe_window double, paused boolean, order string,
    max_inflight int, rate_limit {_RATE}, tenant_max_inflight int, tenant_rate_limit {_RATE}
"""
_EVER = 2**62
_OF_KEY = "partition by run, key order by seq"


def settings(transitions: DataFrame) -> DataFrame:
    """Return each change of settings: ``run``, ``key``, ``seq``, ``ts``, ``until`` and the settings.

    ``until``: the ``seq`` of the queue's next change; null for the last change. A rate limit is given by its tokens
    (``burst``) and its tokens per second (``rate``).
    """
    chosen = ["run", "shard", "key", "seq", "ts"]
    limits = [
        expression
        for name in ("", "tenant_")
        for expression in (
            f"{name}rate_limit.max_tokens as {name}burst",
            f"try_divide({name}rate_limit.max_tokens, {name}rate_limit.interval * {_seconds(name)}) as {name}rate",
        )
    ]
    return (
        transitions.where("event = 'configured'")
        .selectExpr(*chosen, f"from_json(reason, '{_SETTINGS}') as parsed")
        .dropDuplicates(["run", "shard", "seq"])
        .selectExpr(*chosen, "parsed.*")
        .selectExpr(
            "* except (rate_limit, tenant_rate_limit)",
            *limits,
            f"lead(seq) over ({_OF_KEY}) as until",
        )
    )


def switches(transitions: DataFrame) -> DataFrame:
    """Return the queues (``run`` and ``key``) whose journal was switched off for some time, and those times (``dark``).

    ``dark``: an array with the first and last number of each period without a journal. If the first settings have a
    version other than 1, the queue existed before its journal. If the last settings switch the journal off, and no
    later transition exists, the journal is off from then on. A missing version means that the journal was off when the
    settings changed.
    """
    changes = settings(transitions).selectExpr(
        "*",
        f"lag(seq) over ({_OF_KEY}) as was",
        f"coalesce(lag(version) over ({_OF_KEY}), 0) as was_version",
        f"coalesce(lag(journal) over ({_OF_KEY}), true) as was_on",
    )
    latest = (
        transitions.where("key is not null")
        .groupBy("run", "key")
        .agg(F.expr("max(seq)").alias("latest"))
    )
    span = "named_struct('first', cast({} as bigint), 'last', cast({} as bigint))"
    opened = "version > was_version + 1 or (not was_on and journal)"
    closed = "not journal and until is null and seq = latest"
    dark = f"""array_compact(array(
        if({opened}, {span.format("coalesce(was, -1) + 1", "seq - 1")}, null),
        if({closed}, {span.format("seq + 1", _EVER - 1)}, null)))"""
    return (
        changes.join(latest, ["run", "key"])
        .selectExpr("run", "key", f"explode({dark}) as span")
        .where("span.last >= span.first")
        .groupBy("run", "key")
        .agg(F.expr("sort_array(collect_list(span))").alias("dark"))
    )


def _seconds(name: str) -> str:
    """Return an SQL expression for the length in seconds of the interval unit of a rate limit."""
    units = " ".join(f"when '{unit.value}' then {float(unit.seconds)}D" for unit in IntervalUnit)
    return f"case {name}rate_limit.interval_unit {units} end"
