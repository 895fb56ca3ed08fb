"""The history of a run: each process appends one JSON line per event to its own file.

Each line is one write to a file opened for appending, so it survives a SIGKILL of its writer. Times are readings of the
monotonic clock, which all processes of a machine share. So if one event certainly happened before another one, its time
is lower.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import msgspec

from taskqueue_core.tasks import Delivery


class What(StrEnum):
    """Kinds of events.

    A call and its answer are two events; a call without an answer may or may not have had an effect.
    """

    PUBLISH = "publish"
    """a publish was called; one event per task, ``call`` identifies the batch"""
    PUBLISHED = "published"
    """a publish was answered: ``accepted``, ``duplicate``, ``conflict``, ``refused``, ``unavailable`` or
    ``unconfirmed``"""

    RECEIVED = "received"
    """a receive was answered with ``count`` deliveries"""
    BLIND = "blind"
    """a receive failed or was cancelled, so the store may have made deliveries that the consumer does not know"""
    DELIVERED = "delivered"
    """one delivery of a receive"""
    ADOPTED = "adopted"
    """this process adopted a delivery of another one; its receipt did not change"""
    REVOKED = "revoked"
    """the store told this process that one of its receipts is no longer valid"""
    SETTLE = "settle"
    """a settlement was called for one receipt; ``verb`` is ack, redeliver, lost, dead_letter or retry (with ``due``)"""
    SETTLED = "settled"
    """a settlement was answered: ``ok``, ``duplicate``, ``dead``, ``lease_lost`` or ``unknown``"""
    EXECUTED = "executed"
    """a worker's handler began to execute a delivery, which stands for its side effect"""
    CLOSE = "close"
    """a subscription is being closed, which returns its deliveries"""
    CLOSED = "closed"

    REACHED = "reached"
    """the process is at the point ``name``, and waits there for a fault"""
    FIRED = "fired"
    """what the store has recorded of an instant: ``task`` is its task and ``outcome`` the result; ``count`` instants"""

    # Calls of operators, with ``count`` or ``outcome`` where it applies.
    RETRY = "retry"
    """an operator schedules a retry for ``due`` without having a delivery of the task"""
    RETRIED = "retried"
    REDRIVE = "redrive"
    DISCARD = "discard"
    CANCEL = "cancel"
    PURGE = "purge"

    # Changes of settings that rules depend on.
    SETTINGS = "settings"
    """a setting of queue ``key`` changes: ``name`` is max_losses; limit, rate or burst (with the prefix ``tenant_``:
    for each tenant); fair, floor, shards or max_processing; or weight, of the tenant ``target``. ``value`` is its new
    value; None if it is unset or not known at the moment"""
    PAUSE = "pause"
    PAUSED = "paused"
    """a pause was confirmed; ``store_at`` is the store's time of the confirmation"""
    RESUME = "resume"

    CALLBACK = "callback"
    """one attempt to send the callback of ``task``: ``receipt`` is its webhook-id, ``outcome`` the result"""
    CALLBACK_ENDED = "callback_ended"
    """the callback of ``task`` has reached the final state ``outcome``"""
    SLOT_TAKEN = "slot_taken"
    """a slot was taken: ``name`` is the slot, ``receipt`` the token of its holder"""
    SLOT_FREED = "slot_freed"

    RUN = "run"
    """a GPU server began to run the job ``task``; ``name`` is the endpoint"""
    RAN = "ran"
    """the run of a job ended: ``outcome`` is success, unusable, failed, refused or cancelled"""
    ENDING = "ending"
    """the end of a job in the store: ``outcome`` is its state, ``note`` the job that its result names, or its error"""

    # Processes and faults; recorded by the test itself, ``target`` is the process or server concerned.
    STARTED = "started"
    """a process started; ``wall`` is the difference between its wall clock and its monotonic clock"""
    KILLED = "killed"
    FROZEN = "frozen"
    THAWED = "thawed"
    ENDED = "ended"
    CUT = "cut"
    """from now on ``target`` cannot reach the store"""
    MENDED = "mended"
    FAULT = "fault"
    """the fault ``name`` began"""
    HEALED = "healed"
    """the fault ``name`` is over"""
    PHASE = "phase"
    """the run enters a phase; ``name`` is load, faults, heal, quiesce or done"""
    ERROR = "error"
    """an error that must not happen, described by ``note``"""


class Event(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One event of a run. Fields that do not apply keep their defaults."""

    at: float
    """seconds of the monotonic clock"""
    by: str
    """name of the process start that recorded the event; no two starts share one"""
    what: What
    call: int = 0
    """number that connects a call and its answer within one process"""
    key: str = ""
    task: str = ""
    receipt: str = ""
    verb: str = ""
    outcome: str = ""
    name: str = ""
    target: str = ""
    note: str = ""
    count: int = 0
    attempt: int = 0
    losses: int = 0
    prior: int = 0
    priority: int = 5
    max_attempts: int | None = None
    payload: str = ""
    """digest of the payload, to tell different payloads apart"""
    ordering_key: str = ""
    tenant: str = ""
    origin: str = ""
    """how the task of a publish comes into its queue, if not at once: ``step`` of a workflow, or ``schedule``"""
    after: tuple[str, ...] = ()
    """the ids of the tasks that the task waits for, each with its queue key and a slash"""
    when: str = ""
    """what it waits for: that all are ``done``, that all have ``ended``, or that one has ``failed``"""
    not_before: float | None = None
    deadline: float | None = None
    due: float | None = None
    store_at: float | None = None
    """the store's time of the delivery or confirmation"""
    wall: float | None = None
    value: float | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class Log:
    """Appends the events of one process to its file, each with one write."""

    def __init__(self, path: Path, by: str) -> None:
        """Open ``path``. Only one process may write to it, so that its lines are in order."""
        self.by = by
        self._calls = itertools.count(1)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def next_call(self) -> int:
        """Return a number that identifies a call and its answer."""
        return next(self._calls)

    def note(self, what: What, **fields: Any) -> Event:
        """Append an event with the current time."""
        event = Event(at=time.monotonic(), by=self.by, what=what, **fields)
        os.write(self._file, _encoder.encode(event) + b"\n")
        return event

    def about(self, delivery: Delivery, what: What, **fields: Any) -> None:
        """Append an event about a delivery."""
        self.note(
            what,
            key=delivery.task.key,
            task=delivery.task.id,
            receipt=delivery.receipt,
            attempt=delivery.attempt,
            **fields,
        )

    def came(self, delivery: Delivery, what: What = What.DELIVERED) -> None:
        """Append that this process received or adopted a delivery, with the delivery's details."""
        self.about(
            delivery,
            what,
            losses=delivery.losses,
            prior=delivery.prior,
            store_at=delivery.delivered_at,
        )

    def started(self) -> None:
        """Append the start of this process and the difference between its clocks."""
        self.note(What.STARTED, wall=time.time() - time.monotonic())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> Iterator[Event]:
    """Yield the events of one file. An incomplete last line, whose writer was killed, is skipped."""
    content = path.read_bytes()
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        yield _decoder.decode(line)


def merge(paths: Iterable[Path]) -> list[Event]:
    """Return the events of several files, ordered by time."""
    return sorted((event for path in paths for event in read(path)), key=lambda event: event.at)
