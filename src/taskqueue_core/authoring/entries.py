"""The rules of the contract for one task, without any storage: for backends that keep a record per task.

A backend loads an entry, lets one of these methods change it, and stores it again, all in one atomic
step. Moving it between lanes, counters and indexes is the backend's part. See
docs/writing-a-backend.md.
"""

from __future__ import annotations

import msgspec

from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import (
    DeadLetter,
    Delivery,
    Failure,
    Published,
    Settled,
    State,
    Task,
    TaskStatus,
)

__all__ = ["LOST", "POISONED", "Entry"]

LOST = "lost"
"""the verb of a delivery that was released as lost"""
POISONED = "max_losses_exceeded"
"""the reason of a dead letter that was lost with its consumer too often"""
_HISTORY = 20
_AT_REST = (State.WAITING, State.SCHEDULED)


class Entry(msgspec.Struct, kw_only=True, eq=False):
    """One task, and its one live or last entry."""

    task: Task
    state: State | None = None
    """none before the first step"""
    attempt: int = 1
    handed_out: int = 0
    """the last attempt that was delivered"""
    prior: int = 0
    losses: int = 0
    receipt: str | None = None
    delivered_at: float = 0.0
    available_at: float = 0.0
    """since when it has its place among those of its state"""
    updated_at: float = 0.0
    last: tuple[str, str, Settled] | None = None
    """the last settlement: receipt, verb, answer"""
    tokens: set[str] = msgspec.field(default_factory=set)
    """of the retries"""
    history: list[Failure] = msgspec.field(default_factory=list)
    reason: str | None = None
    progress: float | str | None = None
    result: bytes | None = None
    result_until: float = 0.0
    counted: bool = False
    """against the queue's capacity"""

    @property
    def live(self) -> bool:
        """Whether it may still be delivered."""
        return self.state is not None and self.state.live

    @property
    def ended(self) -> bool:
        """Whether it is over: neither live nor dead."""
        return self.state is not None and not self.live and self.state is not State.DEAD

    def recognise(self, task: Task, now: float, window: float) -> Published | None:
        """Say what publishing ``task`` again means; ``None`` once the window after the end has passed."""
        if self.ended and now >= self.updated_at + window:
            return None
        return Published.DUPLICATE if self.is_of(task.payload) else Published.CONFLICT

    def is_of(self, payload: bytes) -> bool:
        """Whether this is the task's payload. A backend that lets go of payloads after the end overrides this."""
        return self.task.payload == payload

    def recount(self) -> int:
        """Return by how much this step changes what counts against the capacity: a task that was never delivered.

        To be called once after each change of state.
        """
        counts = not self.handed_out and self.attempt == 1 and self.state in _AT_REST
        change = counts - self.counted
        self.counted = counts
        return change

    def hand_out(self, receipt: str, now: float) -> Delivery:
        """Deliver it."""
        self.receipt, self.handed_out, self.delivered_at = receipt, self.attempt, now
        return self.delivery

    def settled_before(self, receipt: str, verb: str) -> Settled:
        """Answer a settlement whose receipt is not current."""
        if self.last is not None and self.last[:2] == (receipt, verb):
            return self.last[2]
        return Settled.LEASE_LOST

    def settle(self, verb: str) -> None:
        """End the current receipt by a settlement. Where it ends otherwise, the caller clears it."""
        if self.receipt is not None:
            self.last = (self.receipt, verb, Settled.OK)
        self.receipt = None

    def store_result(self, result: bytes | None, now: float, ttl: float) -> None:
        """Keep what an ack brought."""
        self.result, self.result_until, self.progress = result, now + ttl, None

    def lose(self, max_losses: int, now: float) -> bool:
        """Count a loss. Return whether that was one too many: it is dead then.

        After `settle` if its owner reported the loss; its answer is then `Settled.DEAD`. With the receipt still
        set if the delivery was taken back, which changes no answer.
        """
        self.losses += 1
        self.fail("lost with its consumer", now)
        if self.losses <= max_losses:
            return False
        self.reason = POISONED
        if self.receipt is None and self.last is not None:
            self.last = (*self.last[:2], Settled.DEAD)
        return True

    def bury(self, reason: str, error: str | None, now: float) -> None:
        """Note why it is given up."""
        self.fail(error, now)
        self.reason = reason[: LIMITS.text]

    def retry_token(self, token: str | None, settles: Delivery | None) -> str:
        """Return the token of a retry: the given one, or by the attempt that was delivered last."""
        return token or f"attempt:{settles.attempt if settles else self.handed_out}"

    def retry(self, token: str, error: str | None, now: float) -> None:
        """Turn to the next attempt. Its receipt, if any, must have ended before."""
        if self.state is State.DEAD:
            self.prior = self.attempt
        self.fail(error, now)
        self.tokens.add(token)
        self.attempt += 1
        self.losses, self.reason = 0, None

    def redrive(self) -> None:
        """Grant a dead task its attempts again."""
        self.prior, self.losses, self.reason = self.attempt - 1, 0, None

    def fail(self, error: str | None, now: float) -> None:
        """Add to the history; the oldest failures fall out."""
        if error is not None:
            failure = Failure(attempt=self.attempt, at=now, error=error[: LIMITS.text])
            self.history = [*self.history[1 - _HISTORY :], failure]

    @property
    def delivery(self) -> Delivery:
        """The delivery in which it is out."""
        return Delivery(
            task=self.task,
            receipt=self.receipt or "",
            attempt=self.attempt,
            losses=self.losses,
            prior=self.prior,
            delivered_at=self.delivered_at,
            waiting_since=self.available_at,
        )

    @property
    def dead_letter(self) -> DeadLetter:
        """It as a dead letter."""
        return DeadLetter(
            task=self.task,
            attempt=self.attempt,
            losses=self.losses,
            reason=self.reason or "",
            failed_at=self.updated_at,
            history=tuple(self.history),
        )

    @property
    def status(self) -> TaskStatus:
        """It as a status."""
        return TaskStatus(
            key=self.task.key,
            task_id=self.task.id,
            state=self.state or State.WAITING,
            attempt=self.attempt,
            losses=self.losses,
            updated_at=self.updated_at,
            progress=self.progress,
            error=self.reason or (self.history[-1].error if self.history else None),
        )
