"""Tasks that wait for other tasks: what becomes of children when their parents change, and lines to other backends."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from msgspec import structs

from taskqueue_core.after import After, TaskRef
from taskqueue_core.authoring.waits import (
    Change,
    Note,
    Seen,
    Wait,
    line_of,
    note_of,
    report_of,
)
from taskqueue_core.capabilities import AT_ONCE, Line, LineKind, Report
from taskqueue_core.tasks import State
from taskqueue_memory.records import TaskRecord, TaskSteps

_PAGE_BYTES = 4 * 1024 * 1024
"""size of the results in a page of lines at which the page ends"""


class Links:
    """The links between children and parents of one backend. The backend is one partition."""

    def __init__(
        self, steps: TaskSteps, member_changed: Callable[[TaskRecord, State | None], None]
    ) -> None:
        """Create no links. ``member_changed`` is called after each change of a member of a batch, or of a batch."""
        self._steps = steps
        self._member_changed = member_changed
        self.lines: dict[int, Line] = {}
        """lines that were not confirmed, by number, the oldest first"""
        self._ends: dict[tuple[TaskRef, TaskRef, str], int] = {}
        """numbers of the lines ``end``, by parent, child and entry"""
        self._numbers = itertools.count(1)
        self._last = 0
        """the last number that was used for a line or a version"""
        self._seen = 0
        """the last number when the lines were last read"""
        self._waiting: set[asyncio.Event] = set()
        self._changed: deque[tuple[TaskRecord, State | None]] = deque()
        self._running = False

    # A child is published

    def begin(self, record: TaskRecord) -> Change | None:
        """Look up the parents of a new record. Return what becomes of it, or ``None`` if it is blocked."""
        after = record.task.after
        if after is None:
            raise ValueError("a task that waits for nothing")
        record.wait = wait = Wait.on(after)
        parents = [self._parent(ref) for ref in after.tasks]
        for place, parent in enumerate(parents):
            if parent is not None and not parent.live:
                change = _hear(record, wait, after, place, self._look_at(parent))
                if change is not None:
                    return change
        record.linked = True
        child, unknown = ref_of(record), list[int]()
        for place in wait.missing:
            parent = parents[place]
            if parent is None:
                unknown.append(place)
            else:
                _add_note(parent, wait.note(child, after, place))
        for line in wait.registrations(child, after, unknown):
            self.add(line)
        return None

    def _parent(self, ref: TaskRef) -> TaskRecord | None:
        found = self._steps.find(ref.key, ref.task_id)
        return None if found is not None and found.replaced is not None else found

    def _look_at(self, parent: TaskRecord) -> Seen:
        kept = parent.state is State.DONE and self._steps.clock.now() < parent.result_until
        return Seen(parent.state, self._last, parent.result if kept else None)

    # A parent changes, or a child ends

    def changed(self, record: TaskRecord, before: State | None) -> None:
        """Inform the children of a record whose state has changed, and forget what it waited for if it has ended."""
        self._changed.append((record, before))
        if self._running:
            return
        self._running, left = True, AT_ONCE
        try:
            while self._changed:
                changed, before = self._changed.popleft()
                if before is State.BLOCKED and changed.state is not State.BLOCKED:
                    self._forget(changed)
                if changed.notes and (not changed.live or before is State.DEAD):
                    left = self._inform(changed, left)
                if changed.task.batch is not None:
                    self._member_changed(changed, before)
                waits = changed.state is State.BLOCKED or changed.task.batch is not None
                changed.linked = bool(changed.notes) or waits
        finally:
            self._running = False

    def _inform(self, parent: TaskRecord, left: int) -> int:
        ref, seen = ref_of(parent), Seen(parent.state, self._number(), self._look_at(parent).result)
        notes = parent.notes or {}
        if parent.ended:
            parent.notes = None
        for note in notes:
            report = report_of(ref, note, seen)
            child = self._child(report)
            if child is not None and left > 0:
                left -= 1
                self.tell(child, report)
            else:
                number = self.add(line_of(report))
                self._ends[ref, note.child, note.entry] = number
        return left

    def _child(self, report: Report) -> TaskRecord | None:
        """Return the child of a report, if it is blocked in this backend."""
        child = self._steps.find(report.child.key, report.child.task_id)
        if child is None or child.wait is None or child.wait.entry != report.entry:
            return None
        return child

    def _forget(self, child: TaskRecord) -> None:
        """Remove the notes of a child that is blocked no longer."""
        after, wait = child.task.after, child.wait
        if after is None or wait is None:
            return
        for place, ref in enumerate(after.tasks):
            parent = self._parent(ref)
            if parent is not None and parent.notes is not None:
                parent.notes.pop(wait.note(ref_of(child), after, place), None)
        child.queue.blocked_on_dead -= bool(wait.dead)
        wait.missing, wait.dead = {}, []

    def tell(self, child: TaskRecord, report: Report) -> None:
        """Report the state of a parent to a child."""
        after, wait = child.task.after, child.wait
        if after is None or wait is None or child.state is not State.BLOCKED:
            return
        with suppress(ValueError):
            place = after.tasks.index(report.parent)
            seen = Seen(report.state, report.version, report.result)
            change = _hear(child, wait, after, place, seen)
            if change is not None:
                self._steps.unblock(child, change)

    # Lines

    def _number(self) -> int:
        self._last = next(self._numbers)
        return self._last

    def add(self, line: Line) -> int:
        """Write a line, and return its number."""
        number = self._number()
        self.lines[number] = structs.replace(line, id=str(number))
        for event in self._waiting:
            event.set()
        return number

    def drop(self, name: str | None) -> None:
        """Delete a line that has this id, if there is one."""
        if name is not None:
            self.lines.pop(int(name), None)

    def page(self, limit: int, after: int) -> tuple[Line, ...]:
        """Return the lines with numbers above ``after``."""
        self._seen, page, size = self._last, list[Line](), 0
        for number, line in self.lines.items():
            if number > after:
                if len(page) == limit or size > _PAGE_BYTES:
                    break
                page.append(line)
                size += len(line.result or b"")
        return tuple(page)

    def confirm(self, line: Line) -> None:
        """Delete a line."""
        self.drop(line.id)
        if line.kind is LineKind.END and line.child is not None:
            name = line.parent, line.child, line.entry
            if self._ends.get(name) == int(line.id):  # not that of a later line
                del self._ends[name]

    def register(self, line: Line) -> Report:
        """Note a child at its parent."""
        parent, note = self._parent(line.parent), note_of(line)
        if parent is None:
            number = self._ends.get((line.parent, note.child, note.entry))
            if number is None:
                return report_of(line.parent, note, Seen(None, self._last))
            end = self.lines[number]
            return report_of(line.parent, note, Seen(end.state, end.version, end.result))
        if not parent.ended:
            _add_note(parent, note)
        return report_of(line.parent, note, self._look_at(parent))

    def release(self, report: Report) -> None:
        """Report the state of a parent to a child that may be in this backend."""
        child = self._child(report)
        if child is not None:
            self.tell(child, report)

    async def wait(self, seconds: float) -> None:
        """Return when there are lines that were not read yet, or after some seconds of the event loop's time."""
        if self._seen != self._last:
            return
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
        finally:
            self._waiting.discard(event)


def _hear(child: TaskRecord, wait: Wait, after: After, place: int, seen: Seen) -> Change | None:
    """Record what was reported of a parent, and count the child if a dead letter holds it now, or no longer."""
    held = bool(wait.dead)
    change = wait.hear(after, place, seen)
    child.queue.blocked_on_dead += bool(wait.dead) - held
    return change


def _add_note(parent: TaskRecord, note: Note) -> None:
    parent.notes = parent.notes or {}
    parent.notes[note] = None
    parent.linked = True


def ref_of(record: TaskRecord) -> TaskRef:
    """Return the name of the task of a record."""
    return TaskRef(record.task.key, record.task.id)
