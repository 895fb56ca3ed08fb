"""The outcome of all checks of a journal, as a title and plain sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

Kind = Literal[
    "altered",
    "lost",
    "contradictory",
    "unbalanced",
    "unreadable",
    "violated",
    "unknown",
    "balanced",
    "empty",
]
_ENDS = ("completed", "dead_lettered", "discarded", "expired", "cancelled")
LIVE = ("blocked", "waiting", "scheduled", "in_flight")
"""verdicts of unfinished tasks, which are also the names of their states"""
COUNTED = ("published", "earlier", *_ENDS, *LIVE, "unknown", "lost")
"""names of the counts in the conservation table"""
_TITLES: dict[Kind, str] = {
    "altered": "The journal was changed after it was written",
    "lost": "Tasks were lost",
    "contradictory": "The journal contradicts itself",
    "unbalanced": "The counts do not balance",
    "unreadable": "Nothing in the journal can be read",
    "violated": "Every task is accounted for, but rules were broken",
    "unknown": "No task is known to be lost, but the journal is incomplete",
    "balanced": "Every task is accounted for",
    "empty": "There are no tasks to check",
}
_STATES = {"dead_lettered": "given up (dead letters)", "in_flight": "in flight"}
_ODD = {
    "orphan": "never published",
    "duplicate_ack": "completed twice",
    "conflict": "ended in two ways",
    "after_end": "continued after the end",
    "not_delivered": "settled without being delivered",
    "published_again": "published again while alive",
    "contradiction": "recorded with two different transitions of the same number",
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the checks of a journal."""

    kind: Kind
    title: str
    sentences: list[str]

    @property
    def ok(self) -> bool:
        """Whether no check found a fault. An unknown result is not a fault."""
        return self.kind in {"unknown", "balanced", "empty"}


def outcome_of(
    total: Mapping[str, Any],
    *,
    rules: Iterable[Mapping[str, Any]] = (),
    anomalies: Mapping[str, int] | None = None,
    gaps: int = 0,
    damaged: int = 0,
    contradictory: int = 0,
    readable: bool = True,
    altered: int = 0,
    unfinished: int = 0,
    store_checked: bool = False,
    short: int = 0,
) -> Outcome:
    """Return the outcome of the checks.

    ``total``: the totals of all queues, with the keys ``queues`` (number of queues), ``balanced``, ``complete`` and
    each name in `COUNTED`. ``rules``: each rule with its ``count`` of violations. ``gaps``: number of missing
    transitions. ``contradictory``: how many numbers are shared by transitions with different content. ``readable``:
    whether any transition of the journal can be read. ``altered``: number of transitions whose digests do not match.
    ``unfinished``: number of runs with digests and without an end mark. ``store_checked``: whether the store was
    queried for unfinished tasks. ``short``: number of published tasks in the journal that the ledgers of the store do
    not have. The opposite is no fault, because tasks that only the ledgers have are older than the journal.
    """
    violations = sum(rule["count"] for rule in rules)
    odd = {name: count for name, count in (anomalies or {}).items() if count}
    complete = total["complete"] and not gaps and not damaged
    kind: Kind = "balanced"
    if altered:
        kind = "altered"
    elif total["lost"]:
        kind = "lost"
    elif contradictory:
        kind = "contradictory"
    elif not total["balanced"] or short:
        kind = "unbalanced"
    elif not readable and (damaged or gaps):
        kind = "unreadable"
    elif not total["queues"] and not gaps and not damaged:
        kind = "empty"
    elif violations or odd:
        kind = "violated"
    elif total["unknown"] or not complete:
        kind = "unknown"
    sentences = [
        *_describe_balance(total, store_checked=store_checked),
        *_faults(total, odd, violations, short, contradictory),
        *_missing(total, gaps, damaged, complete=complete),
        *_digests(altered, unfinished),
    ]
    if not total["queues"]:
        nothing = (
            "no tasks for this time and these queues" if readable else "no entry that can be read"
        )
        sentences = [f"The journal has {nothing}.", *sentences[1:]]
    return Outcome(kind=kind, title=_TITLES[kind], sentences=sentences)


def _describe_balance(total: Mapping[str, int], *, store_checked: bool) -> Iterable[str]:
    begun = total["published"] + total["earlier"]
    yield f"Of {_tasks(begun)}, {_listed(total, _ENDS) or 'none has ended'}."
    if live := _listed(total, LIVE):
        observed = (
            "according to the store"
            if store_checked
            else "according to their last transitions; the store was not queried"
        )
        yield f"{live.capitalize()}, {observed}."


def _faults(
    total: Mapping[str, int],
    odd: Mapping[str, int],
    violations: int,
    short: int,
    contradictory: int,
) -> Iterable[str]:
    if total["lost"]:
        yield f"{_tasks(total['lost']).capitalize()} {_is(total['lost'])} lost: neither ended nor in the store."
    elif total["balanced"] and total["queues"] and not short and not contradictory:
        yield "Each task has exactly one verdict, and no task is lost."
    if contradictory:
        numbers = "number belongs" if contradictory == 1 else "numbers belong"
        yield f"{contradictory:,} {numbers} to different transitions, so the end of their tasks is uncertain."
    elif not total["balanced"]:
        yield "The number of published tasks is not the sum of the verdicts."
    if short:
        yield f"{_tasks(short).capitalize()} of the journal {_is(short)} not in the ledger of the store."
    for name, count in odd.items():
        yield f"{_tasks(count)} {_ODD.get(name, name)}."
    if violations:
        yield f"{violations:,} violation{'' if violations == 1 else 's'} of the rules of a task's history."


def _missing(total: Mapping[str, int], gaps: int, damaged: int, *, complete: bool) -> Iterable[str]:
    if gaps:
        yield f"{gaps:,} transition{' is' if gaps == 1 else 's are'} missing in the journal."
    if damaged:
        yield f"{damaged:,} of the journal's entries cannot be read."
    if total["unknown"]:
        yield f"The end of {_tasks(total['unknown'])} is unknown, because it may be in the missing part."
    elif not complete:
        yield "No loss was found, but tasks may have been lost in the missing part."


def _digests(altered: int, unfinished: int) -> Iterable[str]:
    if altered:
        yield f"Transitions whose digest does not match, because transitions were changed or removed: {altered:,}."
    if unfinished:
        yield (
            f"Runs without an end mark, because they continue, were killed, or were cut off: {unfinished:,}."
        )


def _tasks(count: int) -> str:
    return f"{count:,} task{'' if count == 1 else 's'}"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _listed(total: Mapping[str, int], names: Sequence[str]) -> str:
    parts = [f"{total[name]:,} {_STATES.get(name, name)}" for name in names if total[name]]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
