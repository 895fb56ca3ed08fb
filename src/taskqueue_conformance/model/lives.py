"""The ends of entries in the model, and what follows from them for the tasks that wait for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from taskqueue_conformance.model.batches import Batches, is_batch
from taskqueue_conformance.model.entries import Entry, Span, Wait
from taskqueue_conformance.model.shelf import Shelf
from taskqueue_core.after import TaskRef
from taskqueue_core.tasks import State, Task, TaskStatus


class Lives(Shelf):
    """All entries of the model. When one ends, those that wait for it learn of it.

    A store may report an end to children in the step of the end, or after lines were carried. Until `carried` is
    called, an entry that is released counts as one that may be available.
    """

    def __init__(self) -> None:
        super().__init__()
        self._past: dict[str, Counter[State]] = {}
        self._numbers = 0
        self._before = 0
        """the last number that was given out before the present call"""

        self.news = False
        """whether a wait, a batch or a member of one has ended since lines were carried"""
        self.batches = Batches()

    @property
    def blocked(self) -> bool:
        """Whether any entry waits for others, or did so, so that there may be lines to carry."""
        return self.news or any(e.state is State.BLOCKED for e in self.entries.values())

    def number(self) -> int:
        """Return the next number of an entry that becomes available."""
        self._numbers += 1
        return self._numbers

    def renew(self, task: Task, *, life: bool) -> Entry:
        """Add an entry, in the place of an earlier one of the same task; ``life``: by a publish, not by a retry."""
        old = self.drop(task)
        entry = Entry(task)
        if old is not None:
            entry.inherit(old, life=life)
        self.entries[task.key, task.id] = entry
        return entry

    def drop(self, task: Task) -> Entry | None:
        """Remove the ended entry of a task; it still counts in the ledger."""
        old = self.entries.pop((task.key, task.id), None)
        if old is not None:
            self._past.setdefault(task.key, Counter())[old.state] += 1
            self.batches.dropped(old)
        return old

    def end(self, entry: Entry, state: State, span: Span, verb: str | None = None) -> None:
        """Record that an entry has ended, or become a dead letter."""
        self.end_receipt(entry, verb)
        start = min(span[0], entry.task.deadline or span[0]) if state is State.EXPIRED else span[0]
        if entry.state is not State.IN_FLIGHT:
            self.turns[entry.task.key].reset()
        entry.state, entry.end, entry.holds = state, (start, span[1]), False
        entry.released = None
        if entry.task.batch is not None:
            self.news = True
            if is_batch(entry.task) and not entry.closed:
                self.batches.closing.add(entry.task.batch)
        self.tell(entry, span)

    def end_receipt(self, entry: Entry, verb: str | None) -> None:
        """End the current receipt of an entry, by a settlement if there is a ``verb``."""
        if entry.receipt is not None and verb is not None:
            entry.settled.append((entry.receipt, verb))
        entry.receipt = None

    def begin_wait(self, entry: Entry, at: float, span: Span) -> None:
        """Record that a new entry waits for others, or for its members, and is not available before ``at``."""
        entry.state, entry.release_at = State.BLOCKED, at
        if entry.task.after is None:
            return
        entry.wait = Wait(entry.task.after)
        for ref in entry.task.after.tasks:
            parent = self.entries.get((ref.key, ref.task_id))
            if (
                parent is not None
            ):  # those that are unknown may be published before lines are carried
                entry.wait.hear(ref, parent.state, parent.result)
        self._proceed(entry, span)

    def tell(self, parent: Entry, span: Span) -> None:
        """Tell the entries that wait for an entry what has become of it."""
        ref = TaskRef(parent.task.key, parent.task.id)
        for child in tuple(self.entries.values()):
            if child.state is State.BLOCKED and child.wait and ref in child.wait.missing:
                child.wait.hear(ref, parent.state, parent.result)
                self._proceed(child, span)

    def _proceed(self, entry: Entry, span: Span) -> None:
        """End or release an entry whose wait is over."""
        ends = set() if entry.wait is None else entry.wait.ends
        self.news |= bool(ends)
        if ends == {State.CANCELLED}:
            entry.lingers = True
            self.end(entry, State.CANCELLED, span)
        elif ends:
            entry.released = entry.released or span

    def carried(self, span: Span) -> None:
        """Record that all lines were carried: each wait whose parents have ended, or are unknown, is over."""
        for entry in self.waiting_for_others():
            if entry.wait is None:
                continue
            for ref in tuple(entry.wait.missing):
                if (ref.key, ref.task_id) not in self.entries:
                    entry.wait.hear(ref, None, None)
            self._proceed(entry, span)
        self._end_batches(span)
        greatest = self.number()
        for entry in self.waiting_for_others():
            if entry.released and entry.wait and entry.wait.ends == {State.WAITING}:
                self._unblock(entry, (entry.released[0], span[1]), greatest)
        for entry in self.entries.values():
            entry.lingers = False
        self._before, self.news = greatest, False

    def batch_closed(self, batch: TaskRef, *, answer: bool) -> None:
        """Record the answer to the closing of a batch."""
        entry = self.entries.get((batch.key, batch.task_id))
        blocked = entry is not None and entry.state is State.BLOCKED and is_batch(entry.task)
        assert answer is blocked, f"close answered {answer}; the batch was blocked: {blocked}"
        if answer:
            self.batches.closing.add(batch)
            self.news = True

    def _end_batches(self, span: Span) -> None:
        """End the closed batches whose members have ended. The end of one may end members of another one."""
        self.batches.carried(self.entries.values())
        blocked = [entry for entry in self.waiting_for_others() if is_batch(entry.task)]
        for entry in blocked:
            state = self.batches.end_of(entry, self.entries.values())
            if state is not None:
                self.end(entry, state, span)
                self._end_batches(span)
                return

    def _unblock(self, entry: Entry, span: Span, greatest: int) -> None:
        self.turns[entry.task.key].reset()
        entry.state, entry.released = State.WAITING, None
        if entry.release_at > span[0]:
            entry.schedule(entry.release_at, span, greatest)
        else:
            entry.offer(span, self._before + 1, greatest)

    def either(self, key: str, statuses: dict[str, TaskStatus | None], span: Span) -> None:
        """Record which end a wait had that may have had one or the other."""
        for entry in self.waiting_for_others():
            status = statuses.get(entry.task.id) if entry.task.key == key else None
            if entry.released is None or status is None or status.state is State.BLOCKED:
                continue
            if status.state is State.CANCELLED:
                self.end(entry, State.CANCELLED, span)
            else:
                self._unblock(entry, (entry.released[0], span[1]), self.number())

    def waiting_for_others(self) -> Iterable[Entry]:
        """Return the blocked entries."""
        return [entry for entry in self.entries.values() if entry.state is State.BLOCKED]
