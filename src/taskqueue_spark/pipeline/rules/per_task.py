"""Rules about single steps: R0 to R6, R9, R12 and R13. Most compare a transition with the task's previous one."""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_core.after import INPUTS_TOO_LARGE
from taskqueue_core.capabilities import QueueSettings
from taskqueue_spark.pipeline.task_steps import AT_REST, ENDED, OVER, name_list

ROUNDING = 0.002
"""tolerance in seconds, because a store may round times to milliseconds"""
_DEFAULTS = QueueSettings()
_RELEASED = ("redelivered", "lost")
_SETTLED = f"event in ({name_list(('acked', 'dead_lettered', *_RELEASED))})"
_OVER, _ENDED = (f"before_state in ({name_list(names)})" for names in (OVER, ENDED))
_GIVEN = "event in ('delivered', 'available')"
_NOT_TAKEN = f"coalesce(before_state in ({name_list(AT_REST)}), before_seq is null)"
_TOO_LARGE = (
    f"before_state = 'blocked' and event = 'dead_lettered' and reason = '{INPUTS_TOO_LARGE}'"
)
_WINDOW = f"coalesce(array_min(spans.dedupe_window), {_DEFAULTS.dedupe_window})"
_GONE = "(unix_micros(ts) - unix_micros(before_ts)) / 1e6D"
_EARLY = "(unix_micros(before_due_at) - unix_micros(ts)) / 1e6D"
_DUE_ATTEMPT = "if(event = 'retried', before_attempt + 1, before_attempt)"
_LOST = "(event = 'lost' or (event = 'dead_lettered' and reason = 'max_losses_exceeded'))"
_DUE_LOSSES = (
    f"case when event in ('retried', 'redriven') then 0 "
    f"when {_LOST} then before_losses + 1 else before_losses end"
)
_MAX_LOSSES = f"coalesce(array_max(spans.max_losses), {_DEFAULTS.max_losses})"


class _Rule(NamedTuple):
    """A way to break a rule, as SQL expressions on the rows of `steps` and the settings of their queues."""

    name: str
    condition: str
    text: str
    """description of the violation, with SQL expressions in braces"""
    looks_back: bool = True
    """whether the rule compares with earlier transitions, so that none may be missing before the step"""


_RULES = (
    _Rule("R0", f"event = 'published' and not {_OVER}", "published while it was {before_state}"),
    _Rule(
        "R0", f"event = 'published' and {_OVER} and not blind and {_GONE} < {_WINDOW} - {ROUNDING}",
        f"accepted again {{round({_GONE}, 3)}} s after its end",
    ),
    _Rule(
        "R1", "before_seq is null and not (begins or event = 'retried')", "{event}, but the task was never published",
    ),
    _Rule(
        "R2", f"{_SETTLED} and {_NOT_TAKEN} and not coalesce({_TOO_LARGE}, false)",
        "{event}, but no worker had the task",
    ),
    _Rule(
        "R4", f"event in ('rescheduled', 'replaced') and before_state not in ({name_list(AT_REST)})",
        "{event}, but it was {before_state}",
    ),
    _Rule("R3", f"{_GIVEN} and {_ENDED} and before_state != 'expired'", "{event} after its end: it was {before_state}"),
    _Rule(
        "R4", f"(({_SETTLED} or event in ('expired', 'cancelled')) and {_ENDED}) "
        "or (event in ('redriven', 'discarded') and before_state != 'dead')",
        "{event}, but it was already {before_state}",
    ),
    _Rule(
        "R5", "event = 'delivered' and before_state = 'in_flight'", "delivered again before the last delivery ended",
    ),
    _Rule(
        "R5", f"{_SETTLED} and before_state = 'in_flight' and worker != before_worker",
        "{event} by a worker other than the one that had the task",
    ),
    _Rule("R13", f"{_GIVEN} and before_state = 'expired'", "{event} after its deadline"),
    _Rule(
        "R6", f"event != 'published' and attempt != {_DUE_ATTEMPT}",
        "{event}, with attempt {before_attempt} before and {attempt} after",
    ),
    _Rule(
        "R6", f"event != 'published' and losses != {_DUE_LOSSES}",
        "{event}, with a loss count of {before_losses} before and {losses} after",
    ),
    _Rule(
        "R9", "event in ('available', 'delivered') and before_state = 'scheduled' and before_due_at is not null "
        f"and {_EARLY} > {ROUNDING}",
        f"{{round({_EARLY}, 4)}} s too early",
    ),
    _Rule("R9", "event = 'delivered' and before_state = 'scheduled'", "delivered while it was scheduled"),
    _Rule(
        "R9", "event in ('available', 'delivered') and before_state = 'blocked'",
        "{event} while it waited for other tasks",
    ),
    _Rule("R4", "event = 'released' and before_state != 'blocked'", "released, but it was {before_state}"),
    _Rule(
        "R6", "event = 'published' and (attempt != 1 or losses != 0)",
        "published as attempt {attempt} with a loss count of {losses}", looks_back=False,
    ),
    _Rule(
        "R6", f"event = 'delivered' and losses > {_MAX_LOSSES} and not blind and not unset",
        "delivered with a loss count of {losses}, which is above max_losses", looks_back=False,
    ),
    _Rule(
        "R12", "event = 'delivered' and span.paused and not blind", "delivered while its queue was paused",
        looks_back=False,
    ),
)  # fmt: skip


def broken() -> list[tuple[str, Column, Column]]:
    """Return each way to break a rule: the name of the rule, a condition on a row, and a text.

    The rows are those of `steps` with the columns that `history` adds for the settings of their queues. A rule that
    looks back is not checked if a transition before the step may be missing.
    """
    return [
        (
            rule.name,
            F.expr(f"coalesce({'not hidden and ' * rule.looks_back}({rule.condition}), false)"),
            _text_of(rule.text),
        )
        for rule in _RULES
    ]


def _text_of(text: str) -> Column:
    """Return a text as a column, with the SQL expressions in braces replaced by their values."""
    parts = text.replace("}", "{").split("{")
    columns = [
        F.expr(part).cast("string") if n % 2 else F.lit(part) for n, part in enumerate(parts)
    ]
    return F.concat(*columns)
