"""An entry of the model: its state, when the state changed, and what a backend may report about the entry."""

from __future__ import annotations

from taskqueue_core.tasks import Delivery, State, Task, TaskStatus

Span = tuple[float, float]
"""a least and a greatest value, usually the times on the store's clock before and after a call"""
_ROUNDING = 1e-3
"""seconds by which a store may round a time"""
_ENDED = (State.DONE, State.EXPIRED, State.CANCELLED, State.DISCARDED)


class Entry:
    """The current entry of a task, or its last entry if the task has ended."""

    def __init__(self, task: Task) -> None:
        self.task = task
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
        self.loose = False
        """whether the delivery may have been lost before the entry expired, so that the store may count a loss"""
        self._since: Span = (0.0, 0.0)
        self._number = 0
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
            self.tokens = old.tokens

    def offer(self, span: Span, number: int) -> None:
        """Record that the entry became available at some moment within ``span``."""
        self.state, self.due, self.returned = State.WAITING, 0.0, False
        self.uncounted = False
        self._since, self._number, self._by_time = span, number, False

    def schedule(self, at: float, span: Span, number: int) -> None:
        """Record that the entry becomes available at the time ``at``, or at once if that time has passed."""
        self.state, self.due, self.returned = State.SCHEDULED, at, False
        self._since = (max(at, span[0]), max(at, span[1]))
        self._number, self._by_time = number, True

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
        return self.state is State.WAITING or (
            self.state is State.SCHEDULED and self.due <= span[1]
        )

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
        return comparable and self._number < other._number

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
        if self.attempt is None:
            self.attempt = status.attempt
        if self.loose and status.losses == self.losses + 1:
            self.losses = status.losses
        self.loose = False
        results, true = (status.attempt, status.losses), (self.attempt, self.losses)
        assert results == true, (
            f"wrong (attempt, losses) of {self.name}: expected {true}, got {results} (law 3)"
        )
