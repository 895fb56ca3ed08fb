"""The part of the specification that concerns schedules: which ones are stored, which are due, and what a fire changes.

Times are in microseconds, as in the scripts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from tests.model.books import Name
from tests.model.spec import Spec

RECENT = 20
"""number of outcomes that are kept"""
RETRY = 1_000_000
"""time after which a schedule is due again whose instant was not fired"""
_RESULTS = {-1: "duplicate", -2: "conflict", "duplicate": "overlap"}
_REFUSALS = {"capacity": "queue_full", "tenant_capacity": "tenant_full"}


class Stored(NamedTuple):
    """A schedule as the store keeps it."""

    version: int
    next_at: int | None
    due: int | None
    """time from which on it is due: later than ``next_at`` if the task of the instant was refused"""
    lines: tuple[str, ...] = ()
    """the last outcomes, oldest first: instant, time, number of instants, id of the task ("-" for none) and result"""
    refused: str = ""
    """the line of the last attempt for ``next_at``, if its task was refused"""
    spec: bytes = b""


class Run(NamedTuple):
    """An instant, and the id and the arguments of the task that is published for it."""

    instant: int
    id: str
    task: Any


class Fire(NamedTuple):
    """The plan of one step for one schedule."""

    name: Name
    version: int
    planned: int | None
    """the time for which it was planned; ``None`` to publish tasks only"""
    next_at: int | None
    runs: tuple[Run, ...] = ()
    skips: tuple[tuple[int, int, str], ...] = ()
    """instants that are skipped: the first one, their number, and the reason"""


class Schedules(Spec):
    """The specified behaviour of the scripts for schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.schedules: dict[Name, Stored] = {}
        """by the key of the queue and the name of the schedule"""
        self.puts = 0
        """the last version that was used"""

    def clone(self) -> Self:
        """Return an independent copy."""
        copy = super().clone()
        copy.schedules = dict(self.schedules)
        return copy

    @property
    def ends_early(self) -> bool:
        """Whether the call leaves further tasks to the next one. The small models have too few tasks."""
        return False

    def publish_run(self, key: str, run: Run) -> int | str:
        """Publish the task of an instant, and return the answer."""
        return self.publish(key, [run.task])[0]

    def put_schedule(
        self, name: Name, given: Stored, version: int | None, *, keep: bool
    ) -> Stored | int:
        """Store a schedule if ``version`` is the current one (``None`` for any), and return it.

        Otherwise return the current version, or the stored schedule if this put is a repetition. With ``keep``, a
        stored schedule keeps its next time.
        """
        old = self.schedules.get(name)
        current = old.version if old else 0
        if version not in {None, current}:
            return old if old and old.spec == given.spec else current
        self.puts += 1
        new = given._replace(version=self.puts, due=given.next_at, refused="")
        if old:
            new = new._replace(lines=old.lines)
            if keep:
                new = new._replace(next_at=old.next_at, due=old.next_at, refused=old.refused)
        self.schedules[name] = new
        return new

    def delete_schedule(self, name: Name, version: int | None) -> int:
        """Delete a schedule. Return 1, 0 if there is none, or the current version if it is not ``version``."""
        old = self.schedules.get(name)
        current = old.version if old else 0
        if version not in {None, current}:
            return current
        self.schedules.pop(name, None)
        return int(old is not None)

    def by_due_time(self) -> list[tuple[int, Name]]:
        """Return the schedules that fire, with the time from which on each is due, the earliest first."""
        return sorted(
            ((s.due, name) for name, s in self.schedules.items() if s.due is not None),
            key=lambda pair: (pair[0], field_of(pair[1])),
        )

    def fire(self, fire: Fire) -> list[int | str] | None:
        """Publish the tasks of a plan until one is refused, and set the next time.

        Return the answers for the tasks, or ``None`` if the plan is for another version or time of the schedule.
        """
        old = self.schedules.get(fire.name)
        if old is None or old.version != fire.version or fire.planned not in {None, old.next_at}:
            return None
        lines = [*old.lines, *(f"{at} {self.now} {n} - {why}" for at, n, why in fire.skips)]
        answers: list[int | str] = []
        stopped: int | None = None
        refused, changed = "", not fire.runs
        for run in fire.runs:
            if self.ends_early:
                stopped = run.instant
                break
            answers.append(self.publish_run(fire.name[0], run))
            result, is_over = result_of(answers[-1])
            line = f"{run.instant} {self.now} 1 {run.id} {result}"
            if not is_over:
                stopped, refused = run.instant, line
                break
            changed = True
            lines.append(line)
        next_at = fire.next_at if stopped is None else stopped
        if fire.planned is None or not changed:
            next_at = old.next_at
        if fire.planned is None or (not refused and next_at == old.next_at):
            refused = old.refused
        new = old
        if changed:
            new = new._replace(lines=tuple(lines[-RECENT:]))
        if changed or refused != old.refused:
            new = new._replace(next_at=next_at, due=next_at, refused=refused)
        if fire.planned is not None and next_at == fire.planned:
            new = new._replace(due=max(self.now + RETRY, fire.planned))
        self.schedules[fire.name] = new
        return answers


def result_of(answer: int | str) -> tuple[str, bool]:
    """Return what is recorded of a task, by the answer to its publish, and whether its instant is over."""
    code = answer.partition("/")[0].partition(":")[0] if isinstance(answer, str) else answer
    if isinstance(code, int):
        return _RESULTS.get(code, "accepted"), True
    is_over = code in {"duplicate", "replaced", "not_unique"}
    return _RESULTS.get(code) or _REFUSALS.get(code, code), is_over


def field_of(name: Name) -> str:
    """Return the name of a schedule in the scripts."""
    return f"{name[1]} {name[0]}"
