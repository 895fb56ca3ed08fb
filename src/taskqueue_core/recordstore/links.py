"""Tasks that wait for others: what becomes of children when their parents change, and lines to other partitions.

A store is one partition. It keeps these links by name, where a task is its key, "/" and its id:

- ``note PARENT CHILD ENTRY``: a child that is noted at a parent, whose record is marked (`Record.linked`).
- ``rest PARENT VERSION``: a change of a parent that is not yet reported to all of its children.
- ``line NUMBER``: a line that was not confirmed.
- ``end PARENT CHILD ENTRY``: the number of the last line ``end`` for a child.
- ``asked PARENT CHILD ENTRY``: the number of the last line ``register`` of a child that asked again.
- ``number``: the last number of a line or a version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec
from msgspec import structs

from taskqueue_core.after import After, TaskRef
from taskqueue_core.authoring.waits import Change, Note, Seen, Wait, line_of, note_of, report_of
from taskqueue_core.capabilities import AT_ONCE, Line, LineKind, Report
from taskqueue_core.recordstore.batches import Batches, line_at
from taskqueue_core.recordstore.store import Record, RecordStore
from taskqueue_core.tasks import State

_PAGE_BYTES = 4 * 1024 * 1024
"""size of the results in a page of lines at which the page ends"""
_READ = 16
"""number of links that are read at once"""
_DIGITS = 20
ASK_AFTER = 3600.0
"""seconds after which a blocked task asks again for its parents"""
_ASKED = 1000
"""number of parents after which the other tasks ask in the next step"""
_encode = msgspec.msgpack.encode


class _Kept(msgspec.Struct, array_like=True):
    """The value of a note."""

    number: int
    """the last number when the child was noted: later changes of the parent concern it"""
    wants_result: bool


class _Rest(msgspec.Struct, array_like=True):
    """The value of a rest."""

    state: State
    version: int
    result: bytes | None
    last: str = ""
    """name of the last note that was reported to, if the notes stay"""


class _Noted(NamedTuple):
    """A note that was read."""

    name: str
    note: Note
    number: int


class Links:
    """The links between children and parents. All methods are called within a step.

    ``unblock`` changes a blocked record that waits no longer.
    """

    def __init__(
        self, store: RecordStore, unblock: Callable[[Record, Change, float], None]
    ) -> None:
        self._store = store
        self._unblock = unblock
        self.batches = Batches(store, self.add, unblock)
        self._changed: deque[tuple[Record, State | None]] = deque()
        self._running = False
        self._left = 0
        """number of children that may still be informed directly"""
        self.written = False
        """whether a line was written; the caller resets it"""
        self.asked = 0
        """number of parents that were asked for again; the caller resets it at the beginning of a step"""

    # A child is published

    def begin(self, record: Record, after: After, now: float) -> Change | None:
        """Look up the parents of a new record. Return what becomes of it, or ``None`` if it is blocked."""
        record.wait = wait = Wait.on(after)
        parents, last = [self._parent(ref) for ref in after.tasks], self._last()
        for place, parent in enumerate(parents):
            if parent is not None and not parent.live:
                change = self._hear(record, wait, after, place, _look_at(parent, last, now))
                if change is not None:
                    return change
        child, unknown = ref_of(record), list[int]()
        for place in wait.missing:
            parent = parents[place]
            if parent is None:
                unknown.append(place)
            else:
                self._note(parent, wait.note(child, after, place), last)
        for line in wait.registrations(child, after, unknown):
            self.add(line, now)
        return None

    def _parent(self, ref: TaskRef) -> Record | None:
        found = self._store.load(ref.key, ref.task_id)
        return None if found is None or found.replaced is not None else found

    def _note(self, parent: Record, note: Note, last: int) -> None:
        name = _name_of("note", ref_of(parent), note)
        if self._store.load_link(name) is None:
            self._store.save_link(name, _encode(_Kept(last, note.wants_result)))
        if not parent.linked:
            parent.linked = True
            self._store.save(parent)

    def ask_again(self, record: Record, now: float) -> None:
        """Let a blocked task look at its parents again, because notes or lines may be lost, as in a restored copy."""
        after, wait = record.task.after, record.wait
        if self.asked >= _ASKED:
            return
        record.ask_at = now + ASK_AFTER
        self._store.save(record)
        self.batches.ask_again(record, now)
        if after is None or wait is None:
            return
        child, last, unknown = ref_of(record), self._number(now), list[int]()
        self.asked += len(wait.missing)
        for place in tuple(wait.missing):
            ref, note = after.tasks[place], wait.note(child, after, place)
            parent = self._parent(ref)
            if line_at(self._store, _name_of("end", ref, note)) is not None:
                continue
            if parent is None:
                unknown.append(place)
                continue
            if not parent.ended:
                self._note(parent, note, last)
            self._tell(record, report_of(ref, note, _look_at(parent, last, now)), now)
            if record.state is not State.BLOCKED:
                return
        for line in wait.registrations(child, after, unknown):
            name = _name_of("asked", line.parent, note_of(line))
            if line_at(self._store, name) is None:
                self._store.save_link(name, self.add(line, now).encode())

    # A parent changes, or a child ends

    def changed(self, record: Record, before: State | None, now: float) -> None:
        """Inform the children of a record whose state has changed, and forget what it waited for if it has ended."""
        if not (record.linked or record.task.batch or State.BLOCKED in {before, record.state}):
            return
        self._changed.append((record, before))
        if self._running:
            return
        self._running, self._left = True, AT_ONCE
        try:
            while self._changed:
                changed, former = self._changed.popleft()
                if former is State.BLOCKED and changed.state is not State.BLOCKED:
                    self._forget(changed)
                if changed.linked and (not changed.live or former is State.DEAD):
                    self._inform(changed, now)
                self.batches.changed(changed, former, now)
        finally:  # after an error, the transaction is undone
            self._changed.clear()
            self._running = False

    def _inform(self, parent: Record, now: float) -> None:
        """Report a change to the first children; leave the others to `page`."""
        ref, version = ref_of(parent), self._number(now)
        seen = _look_at(parent, version, now)
        rests = self._store.links(*_within("rest", ref), 1)
        some = [] if rests else list(islice(self._notes(ref, ""), self._left + 1))
        more, last = bool(rests) or len(some) > self._left, ""
        for noted in some[: self._left]:
            last = noted.name
            report = report_of(ref, noted.note, seen)
            if parent.ended:
                self._store.drop_link(noted.name)
            child = self._child(report)
            if child is None:
                self._add_end(report, now)
            else:
                self._left -= 1
                self._tell(child, report, now)
        if more:
            rest = _Rest(seen.state or State.WAITING, version, seen.result, last)
            self._store.save_link(f"{_within('rest', ref)[0]}{version:0{_DIGITS}}", _encode(rest))
            self.written = True

    def _notes(self, parent: TaskRef, after: str) -> Iterator[_Noted]:
        """Yield the notes at a parent, after one with the name ``after``, sorted by name."""
        first, end = _within("note", parent)
        while found := self._store.links(max(first, f"{after} "), end, _READ):
            for name, value in found:
                _, _, child, entry = name.split(" ")
                kept = msgspec.msgpack.decode(value, type=_Kept)
                yield _Noted(name, Note(_ref(child), entry, kept.wants_result), kept.number)
                after = name

    def _child(self, report: Report) -> Record | None:
        """Return the child of a report, if it is blocked in this store."""
        child = self._store.load(report.child.key, report.child.task_id)
        if child is None or child.state is not State.BLOCKED or child.wait is None:
            return None
        return child if child.wait.entry == report.entry else None

    def _tell(self, child: Record, report: Report, now: float) -> None:
        after, wait = child.task.after, child.wait
        if after is None or wait is None or report.parent not in after.tasks:
            return
        seen = Seen(report.state, report.version, report.result)
        change = self._hear(child, wait, after, after.tasks.index(report.parent), seen)
        if change is None:
            self._store.save(child)
        else:
            self._unblock(child, change, now)

    def _hear(
        self, child: Record, wait: Wait, after: After, place: int, seen: Seen
    ) -> Change | None:
        """Record what was reported of a parent, and count the child if a dead letter holds it now, or no longer."""
        held = bool(wait.dead)
        change = wait.hear(after, place, seen)
        self._count_held(child, bool(wait.dead) - held)
        return change

    def _count_held(self, child: Record, by: int) -> None:
        if by:
            self._store.count(child.task.key, "blocked_on_dead", by)

    def _forget(self, child: Record) -> None:
        """Remove the notes of a child that is blocked no longer."""
        after, wait = child.task.after, child.wait
        if after is not None and wait is not None:
            self._count_held(child, -bool(wait.dead))
            for place, parent in enumerate(after.tasks):
                note = wait.note(ref_of(child), after, place)
                self._store.drop_link(_name_of("note", parent, note))

    # Lines

    def _last(self) -> int:
        return int(self._store.load_link("number") or 0)

    def _number(self, now: float) -> int:
        """Return a number that is higher than all before, also than those that a restored copy has lost."""
        number = max(self._last() + 1, int(now * 1_000_000))
        self._store.save_link("number", b"%d" % number)
        return number

    def add(self, line: Line, now: float) -> str:
        """Write a line, and return its id."""
        number = f"{self._number(now):0{_DIGITS}}"
        self._store.save_link(f"line {number}", _encode(structs.replace(line, id=number)))
        self.written = True
        return number

    def _add_end(self, report: Report, now: float) -> None:
        line = line_of(report)
        self._store.save_link(_sent(line), self.add(line, now).encode())

    def page(self, limit: int, after: str, now: float) -> tuple[Line, ...]:
        """Return lines with ids after ``after``. First write lines for children that were not informed directly."""
        left = limit
        for name, value in self._store.links("rest ", "rest!", _READ):
            if left > 0:
                left -= self._continue(name, value, left, now)
        page, size = list[Line](), 0
        while size <= _PAGE_BYTES and len(page) < limit:
            found = self._lines(after, min(_READ, limit - len(page)))
            if not found:
                break
            page += found
            after, size = page[-1].id, size + sum(len(line.result or b"") for line in found)
        return tuple(page)

    def _lines(self, after: str, limit: int) -> list[Line]:
        found = self._store.links(f"line {after} ", "line!", limit)
        return [msgspec.msgpack.decode(value, type=Line) for _, value in found]

    def _continue(self, name: str, value: bytes, limit: int, now: float) -> int:
        """Write up to ``limit`` lines for a rest, and return how many."""
        rest = msgspec.msgpack.decode(value, type=_Rest)
        parent, stays = _ref(name.split(" ")[1]), rest.state is State.DEAD or rest.state.live
        seen, some = Seen(rest.state, rest.version, rest.result), list[_Noted]()
        for noted in self._notes(parent, rest.last):
            if noted.number < rest.version:
                some.append(noted)
            if len(some) == limit:
                break
        for noted in some:
            self._add_end(report_of(parent, noted.note, seen), now)
            if not stays:
                self._store.drop_link(noted.name)
        if len(some) < limit:
            self._store.drop_link(name)
        elif stays:
            rest.last = some[-1].name
            self._store.save_link(name, _encode(rest))
        return len(some)

    def confirm(self, line: Line) -> None:
        """Delete a line."""
        self._store.drop_link(f"line {line.id}")
        if line.kind in (LineKind.COUNT, LineKind.CLOSE):
            self.batches.confirmed(line)
        elif line.child and self._store.load_link(_sent(line)) == line.id.encode():
            self._store.drop_link(_sent(line))

    def register(self, line: Line, now: float) -> Report:
        """Note a child at its parent."""
        parent, note, last = self._parent(line.parent), note_of(line), self._last()
        if parent is not None:
            if not parent.ended:
                self._note(parent, note, last)
            return report_of(line.parent, note, _look_at(parent, last, now))
        found = line_at(self._store, _name_of("end", line.parent, note))
        if found is not None:
            end = msgspec.msgpack.decode(found, type=Line)
            return report_of(line.parent, note, Seen(end.state, end.version, end.result))
        for _, value in self._store.links(*_within("rest", line.parent), 1):
            rest = msgspec.msgpack.decode(value, type=_Rest)
            return report_of(line.parent, note, Seen(rest.state, rest.version, rest.result))
        return report_of(line.parent, note, Seen(None, last))

    def release(self, report: Report, now: float) -> None:
        """Report the state of a parent to a child that may be in this store."""
        child = self._child(report)
        if child is not None:
            self._tell(child, report, now)


def _look_at(parent: Record, version: int, now: float) -> Seen:
    kept = parent.state is State.DONE and now < parent.result_until
    return Seen(parent.state, version, parent.result if kept else None)


def ref_of(record: Record) -> TaskRef:
    """Return the name of the task of a record."""
    return TaskRef(record.task.key, record.task.id)


def _text(ref: TaskRef) -> str:
    return f"{ref.key}/{ref.task_id}"


def _ref(text: str) -> TaskRef:
    return TaskRef(*text.split("/"))


def _within(kind: str, parent: TaskRef) -> tuple[str, str]:
    """Return the limits between which the names of all links of a kind with one parent are."""
    return f"{kind} {_text(parent)} ", f"{kind} {_text(parent)}!"


def _name_of(kind: str, parent: TaskRef, note: Note) -> str:
    return f"{kind} {_text(parent)} {_text(note.child)} {note.entry}"


def _sent(line: Line) -> str:
    """Return the name of the link that has the number of a line ``end``, or of one with which a child asked again."""
    return _name_of("end" if line.kind is LineKind.END else "asked", line.parent, note_of(line))
