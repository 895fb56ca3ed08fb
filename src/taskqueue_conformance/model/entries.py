"""An entry of the model: its state, when the state changed, and what a backend may report about the entry."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from taskqueue_core.after import After, TaskRef
from taskqueue_core.tasks import Delivery, State, Task, TaskStatus

Span = tuple[float, float]
"""a least and a greatest value, usually the times on the store's clock before and after a call"""
_ROUNDING = 1e-3
"""seconds by which a store may round a time"""
_ENDED = (State.DONE, State.EXPIRED, State.CANCELLED, State.DISCARDED)


class Content(NamedTuple):
    """What an id is recognised by: a digest, or else the payload."""

    digest: bytes | None
    payload: bytes | None


def content_of(task: Task) -> Content:
    """Return what a task is recognised by when it is published again."""
    digest = task.content_digest
    return Content(digest, task.payload if digest is None else None)


class Wait:
    """What a task knows of the tasks that it waits for."""

    def __init__(self, after: After) -> None:
        self.after = after
        self.missing = set(after.tasks)
        self.dead: set[TaskRef] = set()
        """the missing parents that are dead letters and hold the task"""
        self.failed = False
        self.unknown = False
        self.results: dict[TaskRef, bytes | None] = {}

    def hear(self, parent: TaskRef, state: State | None, result: bytes | None) -> None:
        """Record that a parent has ended, is a dead letter, or is live again; ``None``: it is not known."""
        self.dead.discard(parent)
        if state is not None and state.live:
            return
        if state is State.DEAD and (self.after.when, self.after.on_dead) == ("done", "hold"):
            self.dead.add(parent)
            return
        self.missing.discard(parent)
        if state is None:
            self.unknown = True
        elif state is State.DONE:
            self.results[parent] = result
        else:
            self.failed = True

    @property
    def ends(self) -> set[State]:
        """The states that the wait may end with: none yet, or two if that depends on the order of the reports."""
        when, ends = self.after.when, set[State]()
        if self.unknown or (when == "done" and self.failed):
            ends.add(State.CANCELLED)
        if when == "failed" and self.failed:
            ends.add(State.WAITING)
        if not self.missing and not ends:
            ends.add(State.CANCELLED if when == "failed" else State.WAITING)
        return ends

    @property
    def inputs(self) -> tuple[bytes | None, ...]:
        """The results that are delivered with the task."""
        return tuple(self.results.get(self.after.tasks[place]) for place in self.after.inputs)


class Entry:
    """The current entry of a task, or its last entry if the task has ended."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.content = content_of(task)
        self.wait: Wait | None = None
        """what the task waits for, or waited for before it was delivered with the results"""
        self.release_at = 0.0
        """time before which a blocked task is not available"""
        self.released: Span | None = None
        """when the wait has ended, until all lines are carried: the store may not know of it yet"""
        self.lingers = False
        """whether the entry was cancelled by the end of a parent, of which the store may not know yet"""
        self.closed = False
        """whether the entry is a batch that ends when all of its members have ended"""
        self.result: bytes | None = None
        self.stored: Span = (0.0, 0.0)
        """time of the publish, which counts for the period of a unique key"""
        self.state = State.WAITING
        self.attempt: int | None = 1
        """``None`` after the retry of a task that was never published, until the backend reports the attempt"""
        self.losses = 0
        self.handed = 0
        self.priors = {0}
        self.due = 0.0
        self.returned = False
        self.receipt: str | None = None
        self.settled: list[tuple[str, str]] = []
        """receipt and verb of every settlement, oldest first; settlements before ``("", "")`` need not be repeatable"""
        self.tokens: set[str] = set()
        self.end: Span = (0.0, 0.0)
        self.owed = False
        """whether the entry must have expired, although the backend has not reported the expiry yet"""
        self.fresh = False
        """whether the entry was accepted, and has been neither delivered nor retried since then"""
        self.holds: bool | None = False
        """whether the entry was delivered and has not ended, so that it blocks its ordering key; ``None`` if unknown"""
        self.uncounted = False
        """whether the limits of its tenant may ignore the entry, because it was not waiting when ``order`` changed"""
        self.patience: float | None = None
        """seconds for which the delivery may run without progress; ``None`` means no limit"""
        self.alive: Span = (0.0, 0.0)
        """time of the delivery, or of its last progress report"""
        self.jumps = False
        """whether the entry got other contents while it was waiting, and may come before others since then"""
        self.loose = False
        """whether the delivery may have been lost before the entry expired, so that the store may count a loss"""
        self.swept = False
        """whether a purge may have ended the entry, because the delivery was lost before"""
        self._since: Span = (0.0, 0.0)
        self._number: tuple[float, float] = (0, 0)
        """least and greatest number: entries that became available in one call have no order among them"""
        self._by_time = False

    @property
    def name(self) -> str:
        """``key/id`` of the task, for messages."""
        return f"{self.task.key}/{self.task.id}"

    def inherit(self, old: Entry, *, life: bool) -> None:
        """Copy the history of the task's earlier entry; with ``life`` (a new publish), only its settlements."""
        self.settled = [*old.settled, ("", "")] if life else old.settled
        if not life:
            self.attempt, self.handed, self.priors = old.attempt, old.handed, old.priors
            self.tokens, self.result = old.tokens, old.result

    def offer(self, span: Span, least: int, greatest: int | None = None) -> None:
        """Record that the entry became available at some moment within ``span``, and at a number in the range."""
        self.state, self.due, self.returned = State.WAITING, 0.0, False
        self.uncounted = self.jumps = False
        self._since, self._by_time = span, False
        self._number = (least, least if greatest is None else greatest)

    def replace(self, task: Task, *, keeps_lane: bool) -> None:
        """Give a waiting entry other contents. It may now come before those that it was behind, but not later.

        With another lane, it may have any place there.
        """
        self.task, self.state, self.due, self.jumps = task, State.WAITING, 0.0, True
        self._since = (0.0, self._since[1] if keeps_lane else inf)
        self._number = (0, self._number[1] if keeps_lane else inf)

    def schedule(self, at: float, span: Span, number: int) -> None:
        """Record that the entry becomes available at the time ``at``, or at once if that time has passed.

        A blocked entry stays blocked.
        """
        if self.state is State.BLOCKED:
            self.release_at = at
            return
        self.state, self.due, self.returned = State.SCHEDULED, at, False
        self.jumps = False
        self._since = (max(at, span[0]), max(at, span[1]))
        self._number, self._by_time = (number, number), True

    def deliver(self, delivery: Delivery, patience: float | None) -> None:
        """Record a delivery, which may run for ``patience`` seconds without progress."""
        self.state, self.receipt, self.handed = State.IN_FLIGHT, delivery.receipt, delivery.attempt
        self.fresh, self.holds, self.uncounted = False, True, False
        self.patience, self.alive = patience, (delivery.delivered_at, delivery.delivered_at)

    def surely_available(self, span: Span) -> bool:
        """Return whether the entry is certainly available in all of ``span``, apart from limits and ordering keys."""
        due = self.state is State.WAITING or (self.state is State.SCHEDULED and self.due <= span[0])
        return due and (self.task.deadline is None or self.task.deadline > span[1])

    def maybe_available(self, span: Span) -> bool:
        """Return whether a correct store may have delivered the entry during ``span``."""
        if self.state is State.BLOCKED:
            return self.released is not None and self.release_at <= span[1]
        return self.state is State.WAITING or (
            self.state is State.SCHEDULED and self.due <= span[1]
        )

    @property
    def replaceable(self) -> bool:
        """Whether the entry was never delivered, so that it may be given other contents."""
        at_rest = self.state in (State.WAITING, State.SCHEDULED, State.BLOCKED) or self.lingers
        return at_rest and not self.handed

    def maybe_in_period(self, span: Span) -> bool:
        """Return whether the period of the unique key may not have ended."""
        unique = self.task.unique
        period = None if unique is None else unique.period
        return period is not None and span[0] < self.stored[1] + period

    def surely_in_period(self, span: Span) -> bool:
        """Return whether the period of the unique key has certainly not ended."""
        unique = self.task.unique
        period = None if unique is None else unique.period
        return period is not None and span[1] < self.stored[0] + period

    def holds_key(self) -> bool:
        """Return whether the entry holds its unique key apart from a period."""
        unique = self.task.unique
        if unique is None:
            return False
        return self.replaceable or (unique.until == "ended" and self.state.live)

    def surely_scheduled(self, span: Span) -> bool:
        """Return whether the entry is scheduled for a time after ``span``."""
        return self.state is State.SCHEDULED and self.due > span[1]

    def maybe_late(self, span: Span) -> bool:
        """Return whether the entry is live and its deadline may have passed."""
        deadline = self.task.deadline
        return self.state.live and deadline is not None and deadline <= span[1]

    def surely_late(self, span: Span) -> bool:
        """Return whether the entry is live although its deadline has certainly passed."""
        deadline = self.task.deadline
        return self.state.live and deadline is not None and deadline <= span[0]

    def maybe_hung(self, span: Span) -> bool:
        """Return whether the entry is in flight and may have exceeded its processing time."""
        running = self.state is State.IN_FLIGHT and self.patience is not None
        return running and self.alive[0] + (self.patience or 0) <= span[1]

    def surely_hung(self, span: Span) -> bool:
        """Return whether the entry is in flight and has certainly exceeded its processing time."""
        running = self.state is State.IN_FLIGHT and self.patience is not None
        return running and self.alive[1] + (self.patience or 0) <= span[0]

    def maybe_forgotten(self, span: Span, window: Span) -> bool:
        """Return whether a correct store may have forgotten the entry. ``window``: least and greatest dedupe window."""
        return self.state in _ENDED and span[1] >= self.end[0] + window[0]

    def surely_forgotten(self, span: Span, window: Span) -> bool:
        """Return whether the greatest dedupe window has certainly ended, so that the task's id is free again."""
        return self.state in _ENDED and span[0] > self.end[1] + window[1]

    def precedes(self, other: Entry) -> bool:
        """Return whether this entry must be delivered before ``other``, which is in the same lane (law 4)."""
        if other.jumps:
            return False
        if self.returned != other.returned:
            return self.returned and other.task.ordering_key is None
        return self.earlier(other)

    def earlier(self, other: Entry) -> bool:
        """Return whether this entry certainly became available before ``other``."""
        if self._since[1] < other._since[0]:
            return True
        comparable = self._by_time == other._by_time and not (
            self._by_time and self._since != other._since
        )
        return comparable and self._number[1] < other._number[0]

    def shares(self, other: Entry) -> bool:
        """Return whether ``other`` is a different entry with the same ordering key in the same queue."""
        entity = self.task.ordering_key
        own = entity is not None and entity == other.task.ordering_key
        return own and self is not other and self.task.key == other.task.key

    def maybe_holds_up(self, other: Entry, span: Span) -> bool:
        """Return whether ``other`` may have to wait for this entry, because both have the same ordering key."""
        if not self.shares(other) or other.holds or not self.state.live:
            return False
        return self.holds is not False or (self.maybe_available(span) and not other.earlier(self))

    def surely_holds_up(self, other: Entry, span: Span) -> bool:
        """Return whether ``other`` must wait for this entry to end, because both have the same ordering key."""
        if not self.shares(other) or self.maybe_late(span) or self.maybe_hung(span):
            return False
        if self.holds:
            return self.state.live
        return other.holds is False and self.surely_available(span) and self.earlier(other)

    def check(self, status: TaskStatus, span: Span) -> None:
        """Compare the entry with the status that the store reports."""
        allowed = {self.state}
        if self.state is State.SCHEDULED and self.due <= span[1]:
            allowed.add(State.WAITING)
        assert status.state in allowed, (
            f"wrong state of {self.name}: expected {self.state}, got {status.state} (law 1)"
        )
        if status.state is State.SCHEDULED:
            assert status.due_at is not None, f"{self.name} is scheduled without a due time (law 8)"
            assert abs(status.due_at - self.due) < _ROUNDING, (
                f"wrong due time of {self.name}: expected {self.due}, got {status.due_at} (law 8)"
            )
        if status.state is State.BLOCKED and self.wait is not None:
            assert set(status.held_by) == self.wait.dead, (
                f"{self.name} is held by {status.held_by}, expected {self.wait.dead} (law 1)"
            )
        if self.attempt is None:
            self.attempt = status.attempt
        if self.loose and status.losses == self.losses + 1:
            self.losses = status.losses
        self.loose = False
        results, true = (status.attempt, status.losses), (self.attempt, self.losses)
        assert results == true, (
            f"wrong (attempt, losses) of {self.name}: expected {true}, got {results} (law 3)"
        )
