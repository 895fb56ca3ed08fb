"""Rules for runs of the dispatcher: what GPU servers ran, and how jobs ended."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tests.chaos.history import Event, What
from tests.chaos.story import Dump, History, Terms, Violation

_INF = float("inf")
_HEALTHY = "t"
"""first letter of the names of tenants whose jobs are not poisonous"""


class JobFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run of the dispatcher."""

    runs: int = 0
    """number of times a GPU server began to run a job"""
    repeated: int = 0
    """number of runs of jobs that an earlier run had completed"""
    callbacks: int = 0
    calm: tuple[float, ...] = ()
    """seconds from the submission of each job of a healthy tenant to its result, without poisonous tenants"""
    beside: tuple[float, ...] = ()
    """the same beside poisonous tenants"""


class Run(msgspec.Struct, frozen=True):
    """One run of a job on a GPU server. It ends with its process if the server recorded no end."""

    event: Event
    end: float
    outcome: str = ""


def runs_of(history: History) -> list[Run]:
    """Return all runs, ordered by their beginning."""
    ends = {(event.by, event.call): event for event in history.of(What.RAN)}
    killed = {event.target: event.at for event in history.of(What.KILLED)}
    runs = []
    for event in history.of(What.RUN):
        ended = ends.get((event.by, event.call))
        if ended is None:
            runs.append(Run(event, killed.get(event.by, _INF)))
        else:
            runs.append(Run(event, ended.at, ended.outcome))
    return runs


def once(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Rule once: no job runs twice at the same time, on one server or on two."""
    by_task: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs_of(history):
        by_task[f"{run.event.key}/{run.event.task}"].append(run)
    for task, runs in by_task.items():
        for one, two in itertools.pairwise(runs):
            if two.event.at < one.end:
                shared = min(one.end, two.end) - two.event.at
                text = (
                    f"ran on {one.event.name} ({one.event.by}) and on {two.event.name} ({two.event.by}) at "
                    f"{two.event.at:.4f} for {shared:.3f} s at the same time"
                )
                yield Violation("once", text, task)


def slots(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Rule slots: no endpoint runs more jobs at once than it has slots."""
    allowed = {key: events[-1].value or 0 for key, events in history.setting("slots").items()}
    by_name: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs_of(history):
        by_name[run.event.name].append(run)
    for name, runs in by_name.items():
        for at, most in _at_once(runs):
            if most > allowed.get(name, 0):
                text = f"ran {most} jobs at {at:.4f}, and has {allowed.get(name, 0):g} slots"
                yield Violation("slots", text, name)
                break


def _at_once(runs: Iterable[Run]) -> Iterator[tuple[float, int]]:
    steps = [(run.event.at, 1) for run in runs] + [(run.end, -1) for run in runs]
    ordered = sorted(steps)
    counts = itertools.accumulate(step for _, step in ordered)
    yield from zip((at for at, _ in ordered), counts, strict=True)


def ends(history: History, _dump: Dump, _terms: Terms) -> Iterator[Violation]:
    """Rule ends: each job ends with its own result, which a server computed, or with a stated failure."""
    done = {(run.event.key, run.event.task) for run in runs_of(history) if run.outcome == "success"}
    for event in history.of(What.ENDING):
        name = f"{event.key}/{event.task}"
        if event.outcome == "done":
            if event.note != event.task:
                yield Violation("ends", f"has the result of {event.note or 'no job'}", name)
            elif (event.key, event.task) not in done:
                yield Violation("ends", "done, and no server has computed its result", name)
        elif event.outcome != "dead":
            yield Violation("ends", f"ended as {event.outcome or 'unknown'}", name)
        elif not event.note:
            yield Violation("ends", "failed without a reason", name)


def figures(history: History) -> JobFigures:
    """Compute the figures of a run of the dispatcher."""
    runs = runs_of(history)
    if not runs:
        return JobFigures()
    first: dict[tuple[str, str], float] = {}
    repeated = 0
    for run in runs:
        name = run.event.key, run.event.task
        repeated += first.get(name, _INF) < run.event.at
        if run.outcome == "success":
            first[name] = min(first.get(name, _INF), run.end)
    phases = {event.name: event.at for event in history.of(What.PHASE)}
    return JobFigures(
        runs=len(runs),
        repeated=repeated,
        callbacks=len(history.of(What.CALLBACK)),
        calm=_waits(history, first, phases.get("calm"), phases.get("beside")),
        beside=_waits(history, first, phases.get("beside"), phases.get("pause")),
    )


def _waits(
    history: History, ended: dict[tuple[str, str], float], begin: float | None, end: float | None
) -> tuple[float, ...]:
    """Return how long each job of a healthy tenant took that was submitted between two times."""
    if begin is None or end is None:
        return ()
    waits = []
    for name, story in history.stories.items():
        since = min((one.called.at for one in story.publications), default=_INF)
        if story.tenant.startswith(_HEALTHY) and begin <= since < end and name in ended:
            waits.append(round(ended[name] - since, 5))
    return tuple(waits)


def p99(times: Iterable[float]) -> float:
    """Return the 99th percentile of durations; 0 if there are none."""
    ordered = sorted(times)
    return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0


def describe(runs: Sequence[JobFigures]) -> str:
    """Return the figures of several runs of the dispatcher as text."""
    calm = [wait for one in runs for wait in one.calm]
    beside = [wait for one in runs for wait in one.beside]
    ratio = p99(beside) / p99(calm) if calm else 0.0
    return (
        f"Dispatcher: {len(runs)} runs, {sum(one.runs for one in runs)} jobs begun on GPU servers, "
        f"{sum(one.repeated for one in runs)} of them again after a success, "
        f"{sum(one.callbacks for one in runs)} callbacks. p99 of healthy tenants: {p99(calm):.3f} s "
        f"of {len(calm)} jobs alone, {p99(beside):.3f} s of {len(beside)} beside a poisonous tenant: "
        f"{ratio:.2f} times."
    )
