"""Checks the history of a run and the final state of the store against all rules, and computes figures."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

import msgspec

from tests.chaos import rules_fate, rules_flow, rules_jobs, rules_order, rules_run, rules_time
from tests.chaos.history import Event, What
from tests.chaos.story import Dump, History, Terms, Violation

Rule = Callable[[History, Dump, Terms], Iterator[Violation]]

RULES: dict[str, Rule] = {
    "R0": rules_fate.r0,
    "R1": rules_fate.r1,
    "R2": rules_fate.r2,
    "R3": rules_fate.r3,
    "R4": rules_fate.r4,
    "R5": rules_fate.r5,
    "R6": rules_fate.r6,
    "R7": rules_order.r7,
    "R8": rules_order.r8,
    "R9": rules_time.r9,
    "R10": rules_time.r10,
    "R11": rules_time.r11,
    "R12": rules_time.r12,
    "R13": rules_time.r13,
    "R14": rules_run.r14,
    "R15": rules_run.r15,
    "R16": rules_run.r16,
    "class": rules_order.classes,
    "floor": rules_order.floor,
    "fair": rules_order.fair,
    "budget": rules_run.budget,
    "log": rules_run.logs,
    "once": rules_jobs.once,
    "slots": rules_jobs.slots,
    "ends": rules_jobs.ends,
    "after": rules_flow.waits,
    "instants": rules_flow.instants,
}


class Spread(msgspec.Struct, frozen=True):
    """Summary of a list of durations in seconds: their number, 99th percentile and maximum."""

    count: int = 0
    p99: float = 0.0
    worst: float = 0.0

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Summarize a list of durations."""
        if not times:
            return cls()
        ordered = sorted(times)
        return cls(len(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1])


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run. Times are in seconds."""

    tasks: int = 0
    """number of tasks that the store confirmed"""
    unknown: int = 0
    """number of tasks that were published without ever getting a definite answer"""
    deliveries: int = 0
    duplicates: int = 0
    """number of deliveries made although the previous holder had not returned the task"""
    held: int = 0
    """number of deliveries in the hands of processes that were killed, frozen or cut off; an upper bound for
    `duplicates`"""
    stale: int = 0
    """number of settlements refused because the lease was lost"""
    lost: int = 0
    waived: int = 0
    faults: dict[str, int] = {}
    redelivery: dict[str, Spread] = {}
    """time until the next delivery, by what happened to the holder: killed, frozen or cut"""
    recovery: Spread = Spread()
    """time from the store's return to each consumer's first answered receive"""
    publishing: Spread = Spread()
    """time from the store's return to each producer's first confirmed publish"""
    jobs: rules_jobs.JobFigures = rules_jobs.JobFigures()
    flows: rules_flow.FlowFigures = rules_flow.FlowFigures()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check: violations, violations excused by a failover, and figures."""

    violations: tuple[Violation, ...]
    waived: tuple[Violation, ...]
    figures: Figures

    @property
    def ok(self) -> bool:
        """Whether no rule was broken, except for violations that a failover excuses."""
        return not self.violations

    def __str__(self) -> str:
        """Return the number of violations per rule, with up to five examples of each."""
        by_rule: defaultdict[str, list[Violation]] = defaultdict(list)
        for violation in self.violations:
            by_rule[violation.rule].append(violation)
        lines = [f"{len(self.violations)} violations"] if self.violations else ["ok"]
        for rule, found in by_rule.items():
            lines += [f"  {rule}: {len(found)}", *(f"    {one}" for one in found[:5])]
        return "\n".join(lines)


def check(events: Iterable[Event], dump: Dump, terms: Terms | None = None) -> Verdict:
    """Apply every rule to a run's events and final state."""
    terms = terms or Terms()
    history = History(events)
    found = [one for rule in RULES.values() for one in rule(history, dump, terms)]
    waived = tuple(one for one in found if one.waived)
    return Verdict(
        violations=tuple(one for one in found if not one.waived),
        waived=waived,
        figures=figures(history, dump, terms, waived=len(waived)),
    )


def figures(history: History, dump: Dump, terms: Terms, *, waived: int = 0) -> Figures:
    """Compute the figures of a history."""
    stories = history.stories.values()
    return Figures(
        tasks=sum(story.stored for story in stories),
        unknown=sum(story.maybe and not story.stored for story in stories),
        deliveries=len(history.handouts),
        duplicates=sum(1 for _ in rules_run.duplicates(history)),
        held=sum(len(held) for _, _, held in _holdings(history, terms)),
        stale=sum(one.outcome == "lease_lost" for s in stories for _, one in s.settlements),
        lost=sum(s.stored and dump.known(s.key, s.task) is None for s in stories),
        waived=waived,
        faults=dict(Counter(event.name for event in history.of(What.FAULT))),
        redelivery=_redelivery(history, terms),
        recovery=Spread.of(_returns(history, What.RECEIVED)),
        publishing=Spread.of(_returns(history, What.PUBLISHED)),
        jobs=rules_jobs.figures(history),
        flows=rules_flow.figures(history),
    )


def _holdings(
    history: History, terms: Terms
) -> Iterator[tuple[Event, float, list[tuple[float, ...]]]]:
    """Yield each fault of a consumer with its end, and when each task it held was delivered next (empty if never)."""
    for event in history.of(What.KILLED, What.FROZEN, What.CUT):
        spans = history.harm[event.target]
        over = next(end for begin, end in spans if begin == event.at)
        if over - event.at < terms.lease:
            continue
        held: list[tuple[float, ...]] = []
        for story in history.stories.values():
            for handout, later in zip_longest(story.handouts, story.handouts[1:]):
                holder = handout.holders[-1]
                if holder[1] != event.target or not holder[0] <= event.at < handout.answered_at:
                    continue
                if later is None or later.first.at > event.at:
                    held.append((later.first.at,) if later else ())
        yield event, over, held


def _redelivery(history: History, terms: Terms) -> dict[str, Spread]:
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event, _, held in _holdings(history, terms):
        times[event.what.value] += [at - event.at for again in held for at in again]
    return {cause: Spread.of(found) for cause, found in sorted(times.items())}


def _returns(history: History, sign: What) -> list[float]:
    """Return how many seconds each process that stayed alive took to give ``sign`` after each return of the store."""
    good = {"", "accepted", "duplicate"}
    signs: defaultdict[str, list[float]] = defaultdict(list)
    for event in history.of(sign):
        if event.outcome in good:
            signs[event.by].append(event.at)
    faults = [e.at for e in history.of(What.FAULT) if e.target.startswith("redis")]
    times: list[float] = []
    for back in history.of(What.HEALED):
        if not back.target.startswith("redis"):
            continue
        until = min((at for at in faults if at > back.at), default=float("inf"))
        for by, ats in signs.items():
            alive = ats[0] < back.at and not history.harmed(by, back.at, until)
            first = next((at for at in ats if at > back.at), None)
            if alive and first is not None and first < until:
                times.append(first - back.at)
    return times
