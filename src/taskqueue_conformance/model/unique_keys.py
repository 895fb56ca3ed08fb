"""The unique keys of the model: which answers to a publish a correct store may give, and what a replacement changes."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from taskqueue_conformance.model.entries import Content, Entry, Span, content_of
from taskqueue_conformance.model.lives import Lives
from taskqueue_core.tasks import Confirmation, Published, Refusal, State, Task

_CODES = (Refusal.NOT_UNIQUE, Refusal.BATCH_CLOSED)


class Answer(NamedTuple):
    """The part of a confirmation that the model checks."""

    status: Published
    existing_id: str | None = None
    code: Refusal | None = None
    """why it is refused, apart from limits"""

    def __repr__(self) -> str:
        """Return the answer as text, for messages."""
        why = (self.code or self.status).value
        return f"{why} ({self.existing_id})" if self.existing_id else why

    @classmethod
    def of(cls, answer: Confirmation) -> Answer:
        """Return the part of a confirmation."""
        code = answer.code if answer.code in _CODES else None
        return cls(answer.status, answer.existing_id, code)


class Remembered(NamedTuple):
    """The id of a publish that replaced the contents of another task."""

    content: Content
    holder: str
    at: Span


class UniqueKeys(Lives):
    """All entries of the model, and the ids of publishes that replaced others."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: dict[tuple[str, str], Remembered] = {}

    def renew(self, task: Task, *, life: bool) -> Entry:
        """Add an entry; its id is no longer that of a publish that replaced another task."""
        self.remembered.pop((task.key, task.id), None)
        return super().renew(task, life=life)

    def of_the_id(self, task: Task, span: Span, window: Span) -> tuple[set[Answer], bool]:
        """Return the answers if the id is known, and whether it may be unknown."""
        known = self.remembered.get((task.key, task.id))
        if known is not None:
            same = Answer(Published.REPLACED, known.holder)
            answer = same if known.content == content_of(task) else Answer(Published.CONFLICT)
            gone = span[0] >= known.at[1] + window[1]
            return set() if gone else {answer}, span[1] >= known.at[0] + window[0]
        entry = self.entries.get((task.key, task.id))
        if entry is None:
            return set(), True
        equal = entry.content == content_of(task)
        answer = Answer(Published.DUPLICATE if equal else Published.CONFLICT)
        gone = entry.surely_forgotten(span, window)
        return set() if gone else {answer}, entry.maybe_forgotten(span, window)

    def of_the_key(self, task: Task, span: Span) -> tuple[set[Answer], bool]:
        """Return the answers if the unique key is held, and whether the task may be stored."""
        if task.unique is None:
            return set(), True
        held = [
            entry
            for entry in self.entries.values()
            if entry.task.unique is not None
            and (entry.task.key, entry.task.unique.key) == (task.key, task.unique.key)
            and (entry.holds_key() or entry.maybe_in_period(span))
        ]
        surely = [entry for entry in held if self._surely_holds(entry, span)]
        if task.unique.on_conflict != "replace":
            kept = task.unique.on_conflict == "keep"
            status = Published.DUPLICATE if kept else Published.REFUSED
            code = None if kept else Refusal.NOT_UNIQUE
            return {Answer(status, e.task.id, code) for e in held}, not surely
        answers = {
            Answer(Published.REPLACED, e.task.id) for e in held if e.replaceable and e.holds_key()
        }
        if any(
            e.replaceable and e.holds_key() and not self._may_have_ended(e, span) for e in surely
        ):
            return answers, False
        answers |= {Answer(Published.DUPLICATE, e.task.id) for e in held if e.maybe_in_period(span)}
        return answers, not any(entry.surely_in_period(span) for entry in held)

    def _surely_holds(self, entry: Entry, span: Span) -> bool:
        if entry.surely_in_period(span):
            return True
        return entry.holds_key() and not self._may_have_ended(entry, span)

    def _may_have_ended(self, entry: Entry, span: Span) -> bool:
        return entry.maybe_late(span) or entry.maybe_hung(span) or entry.lingers

    def due_of(self, task: Task, now: float, first: float) -> float:
        """Return the time at which a task becomes due that is published now; 0 if it is available at once."""
        if task.unique is None:
            return task.not_before or 0.0
        return task.unique.due_at(task.not_before, now, first) or 0.0

    def replaced(self, task: Task, holder: str, span: Span) -> None:
        """Record that a publish has given its contents to another task."""
        self.drop(task)
        self.remembered[task.key, task.id] = Remembered(content_of(task), holder, span)
        entry = self.entries[task.key, holder]
        own = entry.task
        lane = (own.priority, own.tenant, own.ordering_key)
        keeps_lane = lane == (task.priority, task.tenant, task.ordering_key)
        contents = structs.replace(task, id=own.id, after=own.after, batch=own.batch)
        at = self.due_of(task, span[0], entry.stored[0])
        if entry.maybe_available(span):
            self.turns[task.key].reset()
        if entry.lingers:
            entry.task = contents
        elif entry.state is State.BLOCKED:
            entry.task, entry.release_at = contents, at
        elif at > span[0]:
            entry.task = contents
            entry.schedule(at, span, self.number())
        elif entry.maybe_available(span):
            entry.replace(contents, keeps_lane=keeps_lane and entry.state is State.WAITING)
        else:
            entry.task = contents
            entry.offer(span, self.number())
