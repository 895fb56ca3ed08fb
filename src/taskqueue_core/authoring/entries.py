"""The backend contract's rules for a single task, for backends that store one record per task. Nothing is stored here.

A backend loads an entry, changes it with a method of `Entry`, and stores it again, in one atomic step. The backend
itself updates lanes, counters and indexes. See `docs/writing-a-backend.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeVar

import msgspec

from taskqueue_core.authoring.waits import Wait
from taskqueue_core.limits import LIMITS, clean_traceback
from taskqueue_core.tasks import (
    Confirmation,
    DeadLetter,
    Delivery,
    Failure,
    Published,
    Refusal,
    Settled,
    State,
    Task,
    TaskStatus,
)

LOST = "lost"
"""name of the settlement that releases a delivery and counts a loss"""
POISONED = "max_losses_exceeded"
"""reason stored with a dead letter whose task was lost with its consumer too many times"""
_HISTORY = 20
_SMALL = 512
"""maximum size in bytes of a payload that is kept after its task has ended"""
_TRACEBACKS = 3
"""number of the last failures that keep their tracebacks"""
_AT_REST = (State.WAITING, State.SCHEDULED, State.BLOCKED)


class Entry(msgspec.Struct, kw_only=True, eq=False):
    """One task and its state in the queue, or its last state after it has left the queue."""

    task: Task
    state: State | None = None
    """``None`` until the task is stored"""
    attempt: int = 1
    handed_out: int = 0
    """number of the attempt that was delivered last; 0 if the task was never delivered"""
    worker: str | None = None
    """the worker of the last delivery"""
    prior: int = 0
    losses: int = 0
    receipt: str | None = None
    delivered_at: float = 0.0
    timeout: float | None = None
    """timeout of the attempt that was delivered last, from the queue's settings"""
    at: float = 0.0
    """time at which a scheduled task becomes due, in Unix seconds"""
    available_at: float = 0.0
    """time at which the task last became available; a release does not change it"""
    updated_at: float = 0.0
    last: tuple[str, str, Settled] | None = None
    """the last settlement: its receipt, its name and its result"""
    tokens: tuple[str, ...] = ()
    """tokens of the last retries, the oldest first, used to detect repeated calls"""
    history: tuple[Failure, ...] = ()
    reason: str | None = None
    progress: float | str | None = None
    result: bytes | None = None
    result_until: float = 0.0
    counted: bool = False
    """whether the task counts against the queue's capacity"""
    digest: bytes | None = None
    """digest of the content by which the id is recognised, if that is another one than the task's"""
    published_at: float = 0.0
    """time of the publish that stored the task"""
    replaced: str | None = None
    """id of the task that has got the contents of this one, which was never stored: the entry only remembers its id"""

    wait: Wait | None = None
    """what the task waits for, and the results that it was given, if it has parents"""

    @property
    def live(self) -> bool:
        """Whether the entry may still be delivered."""
        return self.state is not None and self.state.live

    @property
    def ended(self) -> bool:
        """Whether the task has ended: it is neither live nor a dead letter."""
        return self.state is not None and not self.live and self.state is not State.DEAD

    @property
    def known_worker(self) -> str | None:
        """The worker that has the task, or whose delivery was the last one of a task that ended or is a dead letter."""
        runs = self.state is State.IN_FLIGHT or self.ended
        dead = self.state is State.DEAD and self.handed_out == self.attempt
        return self.worker if runs or dead else None

    @property
    def movable(self) -> bool:
        """Whether the entry may be rescheduled: it has no delivery, and its attempt was not delivered before."""
        return self.state in _AT_REST and self.handed_out != self.attempt

    def recognise(self, task: Task, now: float, window: float) -> Published | None:
        """Return whether publishing ``task`` again is a duplicate or a conflict.

        Return ``None`` if the stored task ended at least ``window`` seconds ago, because its id may then be used again.
        """
        if self.ended and now >= self.updated_at + window:
            return None
        if not self.is_of(task):
            return Published.CONFLICT
        return Published.DUPLICATE if self.replaced is None else Published.REPLACED

    def is_of(self, task: Task) -> bool:
        """Return whether the task was published with the content of ``task``, even if only a digest of it is kept."""
        own, other = self.task.content_digest, task.content_digest
        if self.digest is None and own is None and other is None:
            return self.task.payload == task.payload
        return (self.digest or digest_of(self.task)) == digest_of(task)

    def shed(self) -> None:
        """Replace a long payload by its digest, because an ended task is only listed, and compared with duplicates."""
        if self.wait is not None:
            self.wait.inputs = {}
        if len(self.task.payload) > _SMALL:
            self.digest = self.digest or digest_of(self.task)
            self.task = msgspec.structs.replace(self.task, payload=b"null")

    def holds(self, now: float) -> bool:
        """Return whether the task holds its unique key."""
        unique = self.task.unique
        if unique is None or self.replaced is not None:
            return False
        if now < self.period_end:
            return True
        return self.replaceable if unique.until == "started" else self.live

    @property
    def period_end(self) -> float:
        """The time until which the task holds its unique key whatever becomes of it; 0 if there is no such time."""
        unique = self.task.unique
        if unique is None or unique.period is None or self.replaced is not None:
            return 0.0
        return self.published_at + unique.period

    @property
    def replaceable(self) -> bool:
        """Whether the task may be given other contents: it waits or is scheduled, and was never delivered."""
        return self.state in _AT_REST and not self.handed_out

    def replace(self, task: Task) -> None:
        """Give the task the contents of another one, but not its id, and not what it waits for.

        The caller updates the state and its indexes.
        """
        self.digest = self.digest or digest_of(self.task)
        own = self.task
        self.task = msgspec.structs.replace(task, id=own.id, after=own.after, batch=own.batch)

    def recount(self) -> int:
        """Update `counted`, and return the change in the number of tasks that count against the capacity: -1, 0 or 1.

        Only waiting, scheduled and blocked tasks that were never delivered or retried count. Call this once after each
        change of state.
        """
        counts = not self.handed_out and self.attempt == 1 and self.state in _AT_REST
        change = counts - self.counted
        self.counted = counts
        return change

    def hand_out(
        self, receipt: str, now: float, timeout: float | None = None, worker: str | None = None
    ) -> Delivery:
        """Start a delivery to ``worker`` with this receipt and the queue's ``timeout``, and return the delivery."""
        self.receipt, self.handed_out, self.delivered_at = receipt, self.attempt, now
        self.timeout, self.worker = timeout, worker
        return self.delivery

    def settled_before(self, receipt: str, verb: str) -> Settled:
        """Return the result of settling a receipt that has already ended.

        If the call repeats the last settlement, the result is the same as before; otherwise, it is ``LEASE_LOST``.
        """
        if self.last is not None and self.last[:2] == (receipt, verb):
            return self.last[2]
        return Settled.LEASE_LOST

    def settle(self, verb: str) -> None:
        """End the current receipt, and record the settlement that ended it.

        If a receipt ends without a settlement, the caller sets `receipt` to ``None`` instead.
        """
        if self.receipt is not None:
            self.last = (self.receipt, verb, Settled.OK)
        self.receipt = None

    def store_result(self, result: bytes | None, now: float, ttl: float) -> None:
        """Store the result that was passed to ``ack``; it expires ``ttl`` seconds after ``now``."""
        self.result, self.result_until, self.progress = result, now + ttl, None

    def lose(self, max_losses: int, now: float) -> bool:
        """Count a loss. Return whether the task now has more losses than ``max_losses`` and must become a dead letter.

        If the owner of the delivery reported the loss, call `settle` first. If the task becomes a dead letter, this
        method then changes the result of that settlement to `Settled.DEAD`. If the backend itself ends the delivery,
        `receipt` must still be set, so that the result of an earlier settlement is not changed.
        """
        self.losses += 1
        self.fail("lost with its consumer", now)
        if self.losses <= max_losses:
            return False
        self.reason = POISONED
        if self.receipt is None and self.last is not None:
            self.last = (*self.last[:2], Settled.DEAD)
        return True

    def bury(
        self, reason: str, error: str | None, now: float, traceback: str | None = None
    ) -> None:
        """Record why the task becomes a dead letter, and the last error. The caller changes the state."""
        self.fail(error, now, traceback)
        self.reason = reason[: LIMITS.text]

    def retry_token(self, token: str | None, settles: Delivery | None) -> str:
        """Return the token of a retry: ``token``, or a default derived from the attempt that was delivered last."""
        return token or f"attempt:{settles.attempt if settles else self.handed_out}"

    def retry(
        self,
        token: str,
        error: str | None,
        now: float,
        traceback: str | None = None,
        *,
        free: bool = False,
    ) -> None:
        """Prepare the next attempt, and record the error. The caller ends the delivery and changes the state.

        ``free`` means that the attempt before it does not count.
        """
        if self.state is State.DEAD:
            self.prior = self.attempt
        elif free:
            self.prior += 1
        self.fail(error, now, traceback)
        self.tokens = (*self.tokens[1 - LIMITS.retry_tokens :], token)
        self.attempt += 1
        self.losses, self.reason = 0, None

    def redrive(self) -> None:
        """Reset the counts of a dead letter, so that the task may use all its attempts again."""
        self.prior, self.losses, self.reason = self.attempt - 1, 0, None

    def fail(self, error: str | None, now: float, traceback: str | None = None) -> None:
        """Add an error to the task's history, which keeps the most recent failures, and fewer tracebacks."""
        if error is None:
            return
        failure = Failure(
            attempt=self.attempt,
            at=now,
            error=error[: LIMITS.text],
            traceback=None if traceback is None else clean_traceback(traceback),
            worker=self.worker if self.handed_out == self.attempt else None,
        )
        history = [*self.history[1 - _HISTORY :], failure]
        if len(history) > _TRACEBACKS:
            older = history[-1 - _TRACEBACKS]
            if older.traceback is not None:
                history[-1 - _TRACEBACKS] = msgspec.structs.replace(older, traceback=None)
        self.history = tuple(history)

    @property
    def delivery(self) -> Delivery:
        """The current delivery of the entry."""
        return Delivery(
            task=self.task,
            receipt=self.receipt or "",
            attempt=self.attempt,
            losses=self.losses,
            prior=self.prior,
            delivered_at=self.delivered_at,
            waiting_since=self.available_at,
            timeout=self.timeout,
            inputs=() if self.wait is None else self.wait.delivered(self.task.after),
        )

    @property
    def dead_letter(self) -> DeadLetter:
        """The entry as a `DeadLetter`."""
        return DeadLetter(
            task=self.task,
            attempt=self.attempt,
            losses=self.losses,
            reason=self.reason or "",
            failed_at=self.updated_at,
            history=self.history,
        )

    @property
    def status(self) -> TaskStatus:
        """The entry as a `TaskStatus`."""
        last = self.history[-1] if self.history else None
        after, wait = self.task.after, self.wait if self.state is State.BLOCKED else None
        return TaskStatus(
            key=self.task.key,
            task_id=self.task.id,
            state=self.state or State.WAITING,
            attempt=self.attempt,
            losses=self.losses,
            updated_at=self.updated_at,
            progress=self.progress,
            error=error_of(self.state or State.WAITING, self.reason, last),
            last_failure=last,
            due_at=self.at if self.state is State.SCHEDULED else None,
            held_by=() if wait is None else wait.held_by(after),
            waits_for=() if wait is None else wait.waits_for(after),
            waits_for_total=0 if wait is None else len(wait.missing),
        )


def error_of(state: State, reason: str | None, last_failure: Failure | None) -> str | None:
    """Return the error in the status of a task, for a ``reason`` that is set for some ends."""
    if reason and state in (State.DEAD, State.CANCELLED):
        return reason
    shown = state.live or state is State.DEAD
    return last_failure.error if last_failure and shown else None


E = TypeVar("E", bound=Entry)


def digest_of(task: Task) -> bytes:
    """Return the digest by which the content of a task is recognised: its own, or that of its payload."""
    return task.content_digest or blake2b(task.payload, digest_size=16).digest()


def meet(task: Task, entries: Iterable[E], now: float) -> Confirmation | E | None:
    """Decide by its unique key what the publish of a task does.

    ``entries`` are those of the queue whose tasks have the key. Return ``None`` if the task is to be stored; the entry
    to `Entry.replace`; or else the answer, and nothing changes. First look for the id, and afterwards for room.
    """
    holders = [entry for entry in entries if entry.holds(now)]
    if task.unique is None or not holders:
        return None
    if task.unique.on_conflict == "replace":
        holders.sort(key=lambda entry: (not entry.replaceable, now >= entry.period_end))
        if holders[0].replaceable:
            return holders[0]
        if now >= holders[0].period_end:  # all of them were delivered
            return None
    kept = task.unique.on_conflict != "refuse"
    return held_by(task, Published.DUPLICATE if kept else Published.REFUSED, holders[0].task.id)


def held_by(task: Task, status: Published, existing_id: str) -> Confirmation:
    """Return the answer to the publish of a task that was not stored, because another one holds its unique key."""
    refused = status is Published.REFUSED
    return Confirmation(
        key=task.key,
        task_id=task.id,
        status=status,
        code=Refusal.NOT_UNIQUE if refused else None,
        reason=f"the task {existing_id!r} holds the unique key" if refused else None,
        existing_id=existing_id,
    )
