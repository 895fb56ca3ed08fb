"""One task and where it is. The methods are the arrows of a task's life; the store writes what they decide."""

from __future__ import annotations

import secrets

import msgspec

from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Failure, Settled, State, Task

_HISTORY = 20  # failures that are kept
_read_task = msgspec.msgpack.Decoder(Task).decode
_read_failures = msgspec.json.Decoder(tuple[Failure, ...]).decode


class Entry(msgspec.Struct):
    """A row of the table ``entries``."""

    key: str
    id: str
    blob: bytes
    """the task, as MessagePack"""
    priority: int
    deadline: float | None
    state: str = ""
    since: float = 0
    """when it came into this state"""
    seq: int = 0
    """place in its lane, or among the dead; at 0 it takes the next when it is stored"""
    due: float | None = None
    """when it leaves this state by itself: promoted, or expired"""
    attempt: int = 1
    prior: int = 0
    losses: int = 0
    handed_out: int = 0
    receipt: str | None = None
    worker: str | None = None
    owner: str | None = None
    """the subscription that holds it"""
    settled: str | None = None
    """verb and receipt of the last settlement"""
    answer: str = ""
    tokens: bytes = b"[]"
    history: bytes = b"[]"
    reason: str | None = None
    progress: bytes | None = None
    result: bytes | None = None

    @classmethod
    def of(cls, task: Task, attempt: int = 1) -> Entry:
        """Make the entry of a task that is new here."""
        blob = msgspec.msgpack.encode(task)
        return cls(task.key, task.id, blob, task.priority, task.deadline, attempt=attempt)

    @property
    def task(self) -> Task:
        """The task as it was published."""
        return _read_task(self.blob)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The last failures, oldest first."""
        return _read_failures(self.history)

    def delivery(self) -> Delivery:
        """Return the delivery that it is in."""
        return Delivery(
            task=self.task,
            receipt=str(self.receipt),
            attempt=self.attempt,
            losses=self.losses,
            prior=self.prior,
            delivered_at=self.since,
        )

    def schedule(self, at: float) -> None:
        """Wait for a time, or for the deadline if that comes first."""
        self.seq = 0
        self.move(State.SCHEDULED, at if self.deadline is None else min(at, self.deadline))

    def wait(self) -> None:
        """Become available, at the end of its lane."""
        self.seq = 0
        self.move(State.WAITING, self.deadline)

    def hand_out(self, worker: str, owner: str) -> None:
        """Begin a delivery."""
        self.move(State.IN_FLIGHT, self.deadline)
        self.receipt, self.worker, self.owner = secrets.token_urlsafe(16), worker, owner
        self.handed_out, self.progress = self.attempt, None

    def finish(self, result: bytes | None) -> Settled:
        """End as executed."""
        self.result = result
        return self.move(State.DONE)

    def hand_back(self, *, lost: bool, max_losses: int, now: float) -> Settled:
        """Return to its place in the lane; if lost too often, die."""
        if lost:
            self.losses += 1
            self.note("lost with its consumer", now)
            if self.losses > max_losses:
                self.bury("max_losses_exceeded", None, now)
                return Settled.DEAD
        return self.move(State.WAITING, self.deadline)

    def bury(self, reason: str, error: str | None, now: float) -> Settled:
        """Go to the dead letters, behind those that lie there."""
        self.note(error, now)
        self.seq = 0
        return self.move(State.DEAD, reason=reason)

    def retry(self, at: float, token: str, error: str | None, now: float) -> None:
        """Schedule the next attempt."""
        self.note(error, now)
        if self.state == State.DEAD:
            self.prior = self.attempt
        self.attempt, self.losses, self.result = self.attempt + 1, 0, None
        self.tokens = msgspec.json.encode([*msgspec.json.decode(self.tokens), token])
        self.schedule(at)

    def redrive(self) -> None:
        """Rise from the dead, with attempts granted anew."""
        self.prior, self.losses = self.attempt - 1, 0
        self.wait()

    def note(self, error: str | None, now: float) -> None:
        """Add an error to the history."""
        if error is not None:
            failure = Failure(attempt=self.attempt, at=now, error=error[: LIMITS.text])
            self.history = msgspec.json.encode([*self.failures, failure][-_HISTORY:])

    def move(self, state: State, due: float | None = None, reason: str | None = None) -> Settled:
        """Change the state; what belonged to the old one is gone."""
        self.state, self.due, self.reason = state.value, due, reason and reason[: LIMITS.text]
        self.receipt = self.worker = self.owner = None
        return Settled.OK
