"""Batches in a `RecordStore`: the counts of their members in this store, which is one partition.

The store keeps these links, where a batch is its key, "/" and its id:

- ``count BATCH``: the count of the members of a batch.
- ``asked BATCH``: the number of the last line ``close`` of a batch that asked again.
- ``complete TIME BATCH``: a batch that was complete at that time, to be forgotten.
- ``partition``: the name of the partition.

What a blocked batch knows of all partitions is in its record (`Record.tally`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from taskqueue_core.after import TaskRef
from taskqueue_core.authoring.batches import (
    KEPT,
    Tally,
    closed,
    is_batch,
    joined,
    moved,
    refused_by_batch,
)
from taskqueue_core.authoring.waits import Change
from taskqueue_core.capabilities import Count, Line, LineKind
from taskqueue_core.recordstore.store import Record, RecordStore
from taskqueue_core.tasks import Confirmation, State, Task

_FORGOTTEN = 100
"""maximum number of batches that one step forgets"""


class _Counted(msgspec.Struct, array_like=True):
    """The value of a count."""

    count: Count
    line: str | None = None
    """id of the line ``count`` that was not confirmed"""
    complete_at: float = 0.0


class Batches:
    """The batches and members of batches in a store. All methods are called within a step.

    ``add`` writes a line and returns its id. ``unblock`` changes a blocked record that waits no longer.
    """

    def __init__(
        self,
        store: RecordStore,
        add: Callable[[Line, float], str],
        unblock: Callable[[Record, Change, float], None],
    ) -> None:
        self._store = store
        self._add = add
        self._unblock = unblock

    def refused(self, task: Task) -> Confirmation | None:
        """Return the answer to a member that comes too late."""
        if task.batch is None or is_batch(task) or not self._counted(task.batch).count.closed:
            return None
        return refused_by_batch(task)

    def begin(self, record: Record, now: float) -> None:
        """Count a new member, or begin to count for a new batch."""
        batch = record.task.batch
        if batch is None:
            return
        if is_batch(record.task):
            record.tally = Tally()
        else:
            self._change(batch, joined, now)

    def changed(self, record: Record, before: State | None, now: float) -> None:
        """Count a member whose state has changed; close a batch that has ended."""
        batch, state, tally = record.task.batch, record.state, record.tally
        if batch is None or state is None:
            return
        if not is_batch(record.task):
            self._change(batch, lambda count: moved(count, before, state), now)
        elif not state.live and tally is not None:
            if not tally.sealed:  # its members may still be added
                self._ask_to_close(batch, now)
            record.tally = None
            self._store.save(record)

    def close(self, batch: TaskRef, now: float) -> bool:
        """Ask all partitions to close a batch of this store. Return False if there is none."""
        record = self._blocked(batch)
        tally = None if record is None else record.tally
        if tally is not None and not tally.sealed:
            self._ask_to_close(batch, now)
        return tally is not None

    def ask_again(self, record: Record, now: float) -> None:
        """Ask all partitions of a closed batch again for their counts, unless the line that asks is still there."""
        batch, tally = record.task.batch, record.tally
        if batch is None or tally is None or not tally.sealed:
            return
        if line_at(self._store, _asked(batch)) is None:
            self._store.save_link(_asked(batch), self._ask_to_close(batch, now).encode())

    def _blocked(self, batch: TaskRef) -> Record | None:
        record = self._store.load(batch.key, batch.task_id)
        return record if record is not None and record.state is State.BLOCKED else None

    def _ask_to_close(self, batch: TaskRef, now: float) -> str:
        return self._add(Line(id="", kind=LineKind.CLOSE, parent=batch), now)

    def seal(self, batch: TaskRef, now: float) -> Count:
        """Accept no more members of a batch, and return its count."""
        self._change(batch, closed, now)
        return self._counted(batch).count

    def tally(self, batch: TaskRef, counts: Sequence[Count], now: float, *, sealed: bool) -> None:
        """Report counts to their batch, and end it if its members have ended."""
        record = self._blocked(batch)
        if record is None or record.tally is None:
            return
        change = record.tally.hear(counts, sealed=sealed)
        if change is None:
            self._store.save(record)
        else:
            self._unblock(record, change, now)

    def confirmed(self, line: Line) -> None:
        """Forget the id of a line ``count`` or ``close`` that was confirmed."""
        if self._store.load_link(_asked(line.parent)) == line.id.encode():
            self._store.drop_link(_asked(line.parent))
        counted = self._counted(line.parent)
        if counted.line == line.id:
            counted.line = None
            self._save(line.parent, counted)

    def forget(self, now: float) -> None:
        """Forget batches that have been complete for long."""
        found = self._store.links("complete ", f"complete {_stamp(now - KEPT)}", _FORGOTTEN)
        for name, _ in found:
            _, at, batch = name.split(" ")
            counted = self._counted(TaskRef(*batch.split("/")))
            if counted.count.complete and _stamp(counted.complete_at) == at:
                self._store.drop_link(f"count {batch}")
            self._store.drop_link(name)

    def _counted(self, batch: TaskRef) -> _Counted:
        found = self._store.load_link(_name_of(batch))
        if found is not None:
            return msgspec.msgpack.decode(found, type=_Counted)
        return _Counted(Count(batch=batch, partition=self._partition(), version=0))

    def _partition(self) -> str:
        found = self._store.load_link("partition")
        if found is None:
            found = secrets.token_hex(8).encode()
            self._store.save_link("partition", found)
        return found.decode()

    def _save(self, batch: TaskRef, counted: _Counted) -> None:
        self._store.save_link(_name_of(batch), msgspec.msgpack.encode(counted))

    def _change(self, batch: TaskRef, change: Callable[[Count], Count], now: float) -> None:
        counted = self._counted(batch)
        count = change(counted.count)
        if count is counted.count:
            return
        counted.count = count
        if count.complete:
            counted.complete_at = now
            self._store.save_link(f"complete {_stamp(now)} {batch.key}/{batch.task_id}", b"")
            if counted.line is not None:
                self._store.drop_link(f"line {counted.line}")
            counted.line = self._add(
                Line(id="", kind=LineKind.COUNT, parent=batch, count=count), now
            )
        self._save(batch, counted)


def line_at(store: RecordStore, name: str) -> bytes | None:
    """Return the line whose number a link has; ``None`` if there is no such link, or no such line any more."""
    number = store.load_link(name)
    return None if number is None else store.load_link(f"line {number.decode()}")


def _name_of(batch: TaskRef) -> str:
    return f"count {batch.key}/{batch.task_id}"


def _asked(batch: TaskRef) -> str:
    return f"asked {batch.key}/{batch.task_id}"


def _stamp(at: float) -> str:
    """Return a time as text that is sorted by time."""
    return f"{max(0, int(at * 1_000_000)):020}"
