"""The rules of the capability ``after`` for a single child and its parents. Nothing is stored here.

See `taskqueue_core.capabilities.dependencies` for the whole protocol.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from taskqueue_core.after import (
    INPUTS_TOO_LARGE,
    PARENT_ENDED,
    PARENTS_SHOWN,
    UNKNOWN_PARENT,
    After,
    TaskRef,
)
from taskqueue_core.capabilities import Line, LineKind, Report
from taskqueue_core.limits import LIMITS
from taskqueue_core.task_state import State
from taskqueue_core.tasks import Confirmation, Published, Refusal, Task

PARENTS_OF_COPIES = 2000
"""maximum number of parents of all copies of a task that one publish stores in several queues"""


def refused_with_parents(task: Task, copies: int) -> Confirmation | None:
    """Return the refusal of a task whose ``copies`` would wait for too many tasks in all; otherwise ``None``."""
    parents = 0 if task.after is None else len(task.after.tasks)
    if copies * parents <= PARENTS_OF_COPIES:
        return None
    return Confirmation(
        key=task.key,
        task_id=task.id,
        status=Published.REFUSED,
        code=Refusal.TOO_MANY_PARENTS,
        reason=(
            f"the queue is bound to {copies} queues, so a task may wait for at most "
            f"{PARENTS_OF_COPIES // copies} others, not {parents}: publish it to one of these queues"
        ),
    )


class Note(msgspec.Struct, frozen=True):
    """A child that is noted at one of its parents."""

    child: TaskRef
    entry: str
    """as in `Report`"""
    wants_result: bool


class Seen(NamedTuple):
    """A parent as its partition sees it."""

    state: State | None
    """``None`` if the partition does not know it"""
    version: int
    result: bytes | None = None


class Change(NamedTuple):
    """What becomes of a child that is no longer blocked."""

    state: State
    """``waiting`` for a release, or ``cancelled`` or ``dead``"""
    reason: str | None = None


_RELEASED = Change(State.WAITING)


class Wait(msgspec.Struct, kw_only=True, eq=False):
    """What a child knows of its parents. Parents are numbered by their positions in `After.tasks`."""

    entry: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """as in `Report`"""
    missing: dict[int, int] = {}
    """the parents that the child waits for, with the highest version that was reported of each"""
    dead: list[int] = []
    """the missing parents that are dead letters"""
    inputs: dict[int, bytes] = {}
    """results of parents that are done, until the child ends"""
    too_large: bool = False
    """whether the results were too large, so that none is kept"""

    @staticmethod
    def on(after: After) -> Wait:
        """Return a new wait for all parents."""
        return Wait(missing=dict.fromkeys(range(len(after.tasks)), 0))

    def hear(self, after: After, place: int, seen: Seen) -> Change | None:
        """Record what was reported of the parent at ``place``. Return ``None`` if the child stays as it is.

        After a change, the child misses no parent, so later reports change nothing.
        """
        known = self.missing.get(place)
        if known is None or seen.version < known:
            return None
        change = self._decide(after, place, seen)
        if change is not None:
            self.missing, self.dead = {}, []
        return change

    def _decide(self, after: After, place: int, seen: Seen) -> Change | None:
        if seen.state is None:
            return Change(State.CANCELLED, UNKNOWN_PARENT)
        if place in self.dead:
            self.dead.remove(place)
        holds = after.when == "done" and after.on_dead == "hold" and seen.state is State.DEAD
        if holds or seen.state.live:
            self.missing[place] = seen.version
            if holds:
                self.dead.append(place)
            return None
        del self.missing[place]
        if seen.state is not State.DONE and after.when != "ended":
            return _RELEASED if after.when == "failed" else Change(State.CANCELLED, PARENT_ENDED)
        if place in after.inputs and seen.result is not None:
            self.inputs[place] = seen.result
            if sum(map(len, self.inputs.values())) > LIMITS.payload:
                self.inputs, self.too_large = {}, True
                return Change(State.DEAD, INPUTS_TOO_LARGE)
        if self.missing:
            return None
        return Change(State.CANCELLED, PARENT_ENDED) if after.when == "failed" else _RELEASED

    def delivered(self, after: After | None) -> tuple[bytes | None, ...]:
        """Return the inputs that are delivered with the child."""
        if after is None or self.too_large:
            return ()
        return tuple(self.inputs.get(place) for place in after.inputs)

    def held_by(self, after: After | None) -> tuple[TaskRef, ...]:
        """Return the dead letters that hold the child."""
        return () if after is None else tuple(after.tasks[place] for place in self.dead)

    def waits_for(self, after: After | None) -> tuple[TaskRef, ...]:
        """Return some of the parents that are missing, sorted."""
        if after is None:
            return ()
        some = (after.tasks[place] for place in islice(self.missing, PARENTS_SHOWN))
        return tuple(sorted(some, key=lambda ref: (ref.key, ref.task_id)))

    def registrations(self, child: TaskRef, after: After, unknown: Iterable[int]) -> Iterator[Line]:
        """Yield the lines ``register``, without their ids, for the parents that the child's partition does not know."""
        for place in unknown:
            yield Line(
                id="",
                kind=LineKind.REGISTER,
                parent=after.tasks[place],
                child=child,
                entry=self.entry,
                wants_result=place in after.inputs,
            )

    def note(self, child: TaskRef, after: After, place: int) -> Note:
        """Return the note of the child for the parent at ``place``."""
        return Note(child, self.entry, place in after.inputs)


def note_of(line: Line) -> Note:
    """Return the note that a line ``register`` asks for."""
    if line.child is None:
        raise ValueError("a registration without a child")
    return Note(line.child, line.entry, line.wants_result)


def report_of(parent: TaskRef, note: Note, seen: Seen) -> Report:
    """Return what a parent reports to a noted child."""
    return Report(
        parent=parent,
        child=note.child,
        entry=note.entry,
        state=seen.state,
        version=seen.version,
        result=seen.result if note.wants_result else None,
    )


def line_of(report: Report) -> Line:
    """Return the line ``end`` for a report, without its id."""
    return Line(
        id="",
        kind=LineKind.END,
        parent=report.parent,
        child=report.child,
        entry=report.entry,
        state=report.state,
        version=report.version,
        result=report.result,
    )
