"""What a step may follow on: R0 to R6, R9, R12 and R13. They look at a transition and the one before of its task."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from taskqueue_core.capabilities import QueueSettings
from taskqueue_spark.pipeline.task_steps import ENDED, OVER

ROUNDING = 0.002
"""the store may keep times in milliseconds"""
_HANDED_BACK = ("redelivered", "lost")
_SETTLED = ("acked", "dead_lettered", *_HANDED_BACK)
_DEFAULTS = QueueSettings()
_POISON = "max_losses_exceeded"


def broken() -> list[tuple[str, Column, Column]]:
    """Return each way to break a rule: the rule, whether a row does so, and a text.

    For the rows of `steps` with what history adds of their queue's settings. What has something hidden before it breaks
    none that looks back.
    """
    return [
        (rule, F.coalesce(condition & (~F.col("hidden") if looks_back else F.expr("true")), F.expr("false")), text)
        for looks_back, rules in ((True, [*_identity(), *_ends(), *_counts(), *_times()]), (False, _alone()))
        for rule, condition, text in rules
    ]  # fmt: skip


_Rules = list[tuple[str, Column, Column]]


def _identity() -> _Rules:
    event, before = F.col("event"), F.col("before_state")
    window = F.coalesce(F.array_min("spans.dedupe_window"), F.lit(_DEFAULTS.dedupe_window))
    gone_for = _seconds("ts") - _seconds("before_ts")
    first, begins = F.col("before_seq").isNull(), F.col("begins") | (event == "retried")
    nobody = F.coalesce(before.isin("waiting", "scheduled"), first)
    return [
        (
            "R0",
            (event == "published") & ~before.isin(*OVER),
            _text_of("published while it was ", before),
        ),
        (
            "R0",
            (event == "published")
            & before.isin(*OVER)
            & ~F.col("blind")
            & (gone_for < window - ROUNDING),
            _text_of("accepted again ", F.round(gone_for, 3), " s after its end"),
        ),
        ("R1", first & ~begins, _text_of("phantom: ", event, ", and nobody published it")),
        ("R2", event.isin(*_SETTLED) & nobody, _text_of(event, ", and nobody had it")),
    ]


def _ends() -> _Rules:
    event, before, worker = F.col("event"), F.col("before_state"), F.col("worker")
    ended = before.isin(*ENDED)
    again = event.isin(*_SETTLED, "expired", "cancelled") & ended
    revived = event.isin("redriven", "discarded") & (before != "dead")
    given = event.isin("delivered", "available")
    others = event.isin(*_SETTLED) & (before == "in_flight") & (worker != F.col("before_worker"))
    return [
        (
            "R3",
            given & ended & (before != "expired"),
            _text_of(event, " after its end: it was ", before),
        ),
        ("R4", again | revived, _text_of(event, ", and it was ", before, " already")),
        (
            "R5",
            (event == "delivered") & (before == "in_flight"),
            F.lit("handed out again, and nobody had given it back"),
        ),
        ("R5", others, _text_of(event, " by another worker than had it")),
        ("R13", given & (before == "expired"), _text_of(event, " after its deadline")),
    ]


def _counts() -> _Rules:
    event, attempt, losses = F.col("event"), F.col("attempt"), F.col("losses")
    before, lost = F.col("before_attempt"), F.col("before_losses")
    poisoned = (event == "dead_lettered") & (F.col("reason") == _POISON)
    expected = F.when(event == "retried", before + 1).otherwise(before)
    grown = F.when((event == "lost") | poisoned, lost + 1).otherwise(lost)
    reset = event.isin("retried", "redriven")
    due = F.when(reset, 0).otherwise(grown)
    later = event != "published"
    return [
        (
            "R6",
            later & (attempt != expected),
            _text_of("attempt ", attempt, " by ", event, " after ", before),
        ),
        (
            "R6",
            later & (losses != due),
            _text_of("losses ", losses, " by ", event, " after ", lost),
        ),
    ]


def _times() -> _Rules:
    event, due = F.col("event"), F.col("before_due_at")
    early = _seconds("before_due_at") - _seconds("ts")
    comes = event.isin("available", "delivered") & (F.col("before_state") == "scheduled")
    return [
        (
            "R9",
            comes & due.isNotNull() & (early > ROUNDING),
            _text_of("came ", F.round(early, 4), " s early"),
        ),
        ("R9", comes & (event == "delivered"), F.lit("handed out while it was scheduled")),
    ]


def _alone() -> _Rules:
    event, attempt, losses = F.col("event"), F.col("attempt"), F.col("losses")
    most = F.coalesce(F.array_max("spans.max_losses"), F.lit(_DEFAULTS.max_losses))
    fresh = (event == "published") & ((attempt != 1) | (losses != 0))
    paused = F.col("span.paused")
    return [
        ("R6", fresh, _text_of("published as attempt ", attempt, " with ", losses, " losses")),
        (
            "R6",
            (event == "delivered") & (losses > most) & ~F.col("blind") & ~F.col("unset"),
            _text_of("delivered after ", losses, " losses"),
        ),
        (
            "R12",
            (event == "delivered") & paused & ~F.col("blind"),
            F.lit("handed out while its queue was paused"),
        ),
    ]


def _seconds(column: str) -> Column:
    return F.unix_micros(column) / 1e6


def _text_of(*parts: str | Column) -> Column:
    return F.concat(
        *(F.lit(part) if isinstance(part, str) else part.cast("string") for part in parts)
    )
