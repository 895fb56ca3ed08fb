"""The capability ``after``: tasks that wait for other tasks, and batches that count their members.

A *partition* is the part of a store that one atomic step can change. A child and its parents may be in different
partitions, and with a composite in different backends. Partitions inform one another by *lines*, which each partition
keeps until they are confirmed. Every server and local worker carries lines (`taskqueue_core.consumer.carrier`), perhaps
the same ones at once: every method may be called again with the same arguments, by several callers, in any order and
late, and changes nothing that it has changed before.

**Publish.** In its own step, a publish of a task with `Task.after` looks up the parents in its own partition, and
stores a *note* of the child at each of them that is live or a dead letter. For each parent that it does not find it
writes a line ``register``; it never decides that a parent is unknown, because the parent may be in another partition or
backend. If the condition is met already, the task is stored as waiting or scheduled, if it cannot be met any more it is
stored and cancelled, otherwise it is stored as ``blocked``.

**End of a parent.** The step in which a task with notes ends or becomes a dead letter informs its children: at most
`AT_ONCE` of its own partition at once, directly, including those that their ends reach in turn; each of the others by a
line ``end``. A dead letter keeps its notes. If it is redriven or retried, the step informs the children again, with the
state ``waiting``. A line carries the result of a parent that is done if the child wants it, so that the parent may be
forgotten at once.

**The child** keeps the set of parents that are missing, and for each the highest version that was reported to it. It is
released, cancelled, or becomes a dead letter (`INPUTS_TOO_LARGE`) in the step that reports the end, and then ignores
all reports. A release takes no capacity and is never refused. The task is scheduled if its time has not come, and
otherwise waiting, at the end of its lane.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from taskqueue_core.after import TaskRef
from taskqueue_core.task_state import State

AT_ONCE = 16
"""maximum number of children that one step informs directly"""


class LineKind(StrEnum):
    """What a line is for."""

    REGISTER = "register"
    """a child asks the partition of a parent for a note"""
    END = "end"
    """a parent reports to a child that it ended, became a dead letter, or is live again"""
    COUNT = "count"
    """a partition reports its counts to a batch"""
    CLOSE = "close"
    """a batch asks all partitions to close it and to report their counts"""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a parent reports to a child."""

    parent: TaskRef
    child: TaskRef
    entry: str
    """which of the entries that had the child's name; a report for another entry changes nothing"""
    state: State | None
    """the state of the parent; ``None`` if its partition does not know it"""
    version: int = 0
    """number that is higher in a later report of the same parent; a child ignores a lower one than before"""
    result: bytes | None = None
    """result of a parent that is done, if the child wants it and it has not expired"""


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """The counts that one partition has of the members of a batch, since the batch began."""

    batch: TaskRef
    partition: str
    """name of the partition, unique among all backends"""
    version: int
    """number that is higher in a later count of the same partition; a batch ignores a lower one than before"""
    closed: bool = False
    """whether the partition accepts no more members"""
    added: int = 0
    done: int = 0
    failed: int = 0
    """number of members that ended in another state than done"""
    dead: int = 0
    """number of members that are dead letters"""

    @property
    def complete(self) -> bool:
        """Whether no member can be added, and all have ended."""
        return self.closed and self.added == self.done + self.failed


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line that a partition keeps until it is confirmed."""

    id: str
    """cursor and name of the line, unique in the backend"""
    kind: LineKind
    parent: TaskRef
    """the parent; in lines ``count`` and ``close``, the batch"""
    child: TaskRef | None = None
    entry: str = ""
    """as in `Report`"""
    wants_result: bool = False
    """in a line ``register``, whether the child wants the result of the parent"""
    state: State | None = None
    """in a line ``end``, the state of the parent"""
    version: int = 0
    """in a line ``end``, as in `Report`"""
    result: bytes | None = None
    """in a line ``end``, as in `Report`"""
    count: Count | None = None
    """in a line ``count``, the newest count of the partition"""


class Dependencies(Protocol):
    """What carries lines between the partitions of a store. All methods are idempotent; see the module."""

    async def lines(self, limit: int, after: str | None = None) -> tuple[Line, ...]:
        """Return up to ``limit`` lines of all partitions, the oldest of each partition first.

        ``after``: the `Line.id` after which to continue; ``None`` from the beginning. Fewer lines than ``limit`` mean
        that there are no more. Lines that are written during the calls may be left out. A store may leave out, for some
        seconds, lines that another process has read. Lines may be large: a page ends when the results in it are larger
        than some megabytes, and then has at least one line and perhaps fewer than ``limit``; read on until a page is
        empty.
        """

    async def changed(self, seconds: float) -> None:
        """Return when there may be new lines, after ``seconds`` at the latest.

        A line that was written by this process ends the wait. It may end for no reason.
        """

    async def register(self, *lines: Line) -> tuple[Report | None, ...]:
        """Store the notes of lines ``register`` at their parents, and return a report for each line, in order.

        ``None`` in place of a report means that the part of the store that may have the parent is unavailable, or that
        it still has to inform children of an earlier task with the parent's name: the line must be registered again.

        For a parent that is live or a dead letter, the step stores the note; the state of the report is the parent's.
        For a parent that has ended, the report has its state and its result. If its partition does not know the parent,
        the state is ``None``; but while there is an unconfirmed line ``end`` of this parent for this child and entry,
        the report is that of the line. A repeated registration stores no second note.
        """

    async def release(self, *reports: Report) -> None:
        """Report the states of parents to children. When this returns, the changes are stored.

        A report changes nothing if the child's partition does not know the child, if the child has another `entry`, is
        not blocked, or does not miss this parent, or if a higher version was reported to it. The states:

        ``done``: the parent is missing no longer, and the child keeps its result, if it wants it. ``dead``: with
        ``when="done"`` and ``on_dead="hold"``, the dead letter holds the child and is in its `TaskStatus.held_by`;
        otherwise it counts as an end that is not done. ``expired``, ``cancelled``, ``discarded``: an end that is not
        done. ``None``: the child is cancelled with the reason `UNKNOWN_PARENT`. A live state: the parent is still
        missing, and no longer holds the child.

        The condition is met with ``when="done"`` or ``"ended"`` if no parent is missing, with ``"failed"`` at the first
        end that is not done. It can no longer be met with ``"done"`` after an end that is not done, with ``"failed"``
        if all parents are done; the child is then cancelled with the reason `PARENT_ENDED`. If the results that it
        keeps are larger together than `Limits.payload`, it becomes a dead letter with the reason `INPUTS_TOO_LARGE` at
        once, and keeps no result.
        """

    async def confirm(self, *lines: Line) -> None:
        """Delete lines that were carried. A line ``count`` stays if the partition has a newer count."""

    async def close(self, batch: TaskRef) -> bool:
        """Write a line ``close`` for a blocked batch. Return False if there is no blocked batch of this name."""

    async def seal(self, batch: TaskRef) -> tuple[Count, ...]:
        """Close a batch in every partition of the backend, and return the count of each partition, also if it is 0.

        From then on, a publish of a new member is refused with `Refusal.BATCH_CLOSED`, and each step that makes the
        count of the partition complete writes a line ``count``.
        """

    async def tally(self, *counts: Count, sealed: bool = False) -> None:
        """Report the counts of partitions to batches. Each batch keeps the newest count of each partition.

        ``sealed``: the counts are those of all partitions, so that the batch knows how many there are. From then on,
        a batch whose counts are all complete ends: as done if no member failed, otherwise as cancelled with the
        reason `PARENT_ENDED`. The event in the journal is ``released``, with the state ``done``, or ``cancelled``.
        """
