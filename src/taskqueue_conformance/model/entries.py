"""One entry of the model: its state, since when, and what a backend may report about it."""

from __future__ import annotations

from taskqueue_core.tasks import Delivery, State, Task, TaskStatus

Span = tuple[float, float]
"""the store's time before and after a call"""
_ENDED = (State.DONE, State.EXPIRED, State.CANCELLED, State.DISCARDED)


class Entry:
    """The live or last entry of one task."""

    def __init__(self, task: Task) -> None:
        """Start a life at attempt 1; `offer` or `schedule` says what is next."""
        self.task = task
        self.state = State.WAITING
        self.attempt: int | None = 1
        """``None``: a retry of a task that the store may not know; the next delivery shows it"""
        self.losses = 0
        self.handed = 0
        self.priors = {0}
        self.due = 0.0
        self.returned = False
        self.receipt: str | None = None
        self.settled: list[tuple[str, str]] = []
        """every settled receipt with its verb, the last one last"""
        self.tokens: set[str] = set()
        self.end: Span = (0.0, 0.0)
        self.owed = False
        """it must have expired unseen: the report is still to come"""
        self.fresh = False
        """accepted, and neither delivered nor retried since"""
        self.holds: bool | None = False
        """it has its ordering key: it was delivered and has not ended; ``None``: who knows"""
        self.uncounted = False
        """it was not waiting when the order became fair, and may not count for its tenant until it does"""
        self.patience: float | None = None
        """how long its delivery may go on without progress"""
        self.alive: Span = (0.0, 0.0)
        """when its delivery was last heard of"""
        self.loose = False
        """it expired when it might have been lost: the loss may have been counted"""
        self._since: Span = (0.0, 0.0)
        self._number = 0
        self._by_time = False

    @property
    def name(self) -> str:
        """How it appears in messages."""
        return f"{self.task.key}/{self.task.id}"

    def inherit(self, old: Entry, *, life: bool) -> None:
        """Follow ``old``: as a new entry in the same life, or in a new ``life`` in which old receipts mean nothing."""
        self.settled = [*old.settled, ("", "")] if life else old.settled
        if not life:
            self.attempt, self.handed, self.priors = old.attempt, old.handed, old.priors
            self.tokens = old.tokens

    def offer(self, span: Span, number: int) -> None:
        """Become available, at some moment of ``span``."""
        self.state, self.due, self.returned = State.WAITING, 0.0, False
        self.uncounted = False
        self._since, self._number, self._by_time = span, number, False

    def schedule(self, at: float, span: Span, number: int) -> None:
        """Become available at a time; at once where that has passed."""
        self.state, self.due, self.returned = State.SCHEDULED, at, False
        self._since = (max(at, span[0]), max(at, span[1]))
        self._number, self._by_time = number, True

    def deliver(self, delivery: Delivery, patience: float | None) -> None:
        """Go in flight, for so long without progress."""
        self.state, self.receipt, self.handed = State.IN_FLIGHT, delivery.receipt, delivery.attempt
        self.fresh, self.holds, self.uncounted = False, True, False
        self.patience, self.alive = patience, (delivery.delivered_at, delivery.delivered_at)

    def surely_available(self, span: Span) -> bool:
        """Whether every correct store would deliver it throughout ``span``."""
        due = self.state is State.WAITING or (self.state is State.SCHEDULED and self.due <= span[0])
        return due and (self.task.deadline is None or self.task.deadline > span[1])

    def maybe_available(self, span: Span) -> bool:
        """Whether a correct store may have delivered it."""
        return self.state is State.WAITING or (
            self.state is State.SCHEDULED and self.due <= span[1]
        )

    def surely_scheduled(self, span: Span) -> bool:
        """Whether it is not due yet."""
        return self.state is State.SCHEDULED and self.due > span[1]

    def maybe_late(self, span: Span) -> bool:
        """Whether it lives and its deadline may have passed."""
        deadline = self.task.deadline
        return self.state.live and deadline is not None and deadline <= span[1]

    def surely_late(self, span: Span) -> bool:
        """Whether it lives although its deadline has passed."""
        deadline = self.task.deadline
        return self.state.live and deadline is not None and deadline <= span[0]

    def maybe_hung(self, span: Span) -> bool:
        """Whether it runs and may have done so for too long."""
        running = self.state is State.IN_FLIGHT and self.patience is not None
        return running and self.alive[0] + (self.patience or 0) <= span[1]

    def surely_hung(self, span: Span) -> bool:
        """Whether it runs and has done so for too long."""
        running = self.state is State.IN_FLIGHT and self.patience is not None
        return running and self.alive[1] + (self.patience or 0) <= span[0]

    def maybe_forgotten(self, span: Span, window: Span) -> bool:
        """Whether a correct store may have forgotten it, by a ``window`` of so long or so long."""
        return self.state in _ENDED and span[1] >= self.end[0] + window[0]

    def surely_forgotten(self, span: Span, window: Span) -> bool:
        """Whether its id must be free again."""
        return self.state in _ENDED and span[0] > self.end[1] + window[1]

    def precedes(self, other: Entry) -> bool:
        """Whether, of two available entries of one lane, this one must be delivered first (law 4)."""
        if self.returned != other.returned:
            return self.returned and other.task.ordering_key is None
        return self.earlier(other)

    def earlier(self, other: Entry) -> bool:
        """Whether this one became available before."""
        if self._since[1] < other._since[0]:
            return True
        comparable = self._by_time == other._by_time and not (
            self._by_time and self._since != other._since
        )
        return comparable and self._number < other._number

    def shares(self, other: Entry) -> bool:
        """Whether it is another one of the same entity."""
        entity = self.task.ordering_key
        own = entity is not None and entity == other.task.ordering_key
        return own and self is not other and self.task.key == other.task.key

    def maybe_holds_up(self, other: Entry, span: Span) -> bool:
        """Whether another one of its entity may have to wait for this one."""
        if not self.shares(other) or other.holds or not self.state.live:
            return False
        return self.holds is not False or (self.maybe_available(span) and not other.earlier(self))

    def surely_holds_up(self, other: Entry, span: Span) -> bool:
        """Whether another one of its entity must not be delivered before this one has ended."""
        if not self.shares(other) or self.maybe_late(span) or self.maybe_hung(span):
            return False
        if self.holds:
            return self.state.live
        return other.holds is False and self.surely_available(span) and self.earlier(other)

    def check(self, status: TaskStatus, span: Span) -> None:
        """Compare with what the store says."""
        allowed = {self.state}
        if self.state is State.SCHEDULED and self.due <= span[1]:
            allowed.add(State.WAITING)
        assert status.state in allowed, (
            f"{self.name} is {status.state}, it must be {self.state} (law 1)"
        )
        if self.attempt is None:
            self.attempt = status.attempt
        if self.loose and status.losses == self.losses + 1:
            self.losses = status.losses
        self.loose = False
        results, true = (status.attempt, status.losses), (self.attempt, self.losses)
        assert results == true, (
            f"{self.name} has (attempt, losses) {results}, it must be {true} (law 3)"
        )
