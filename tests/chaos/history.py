"""What happened in a run, as each process noted it: one JSON line per event, in an order that is real.

Every line is one write to a file opened for appending, so it survives the SIGKILL of its writer, and a line is whole or
absent. Times are those of the monotonic clock, which all processes of one machine share: an event that another one
preceded for certain has the higher time.
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
    """What can happen. Calls and their answers are two events; a call without an answer may or may not have worked."""

    # producers
    PUBLISH = "publish"
    """called, for one task of the batch ``call``"""
    PUBLISHED = "published"
    """answered: ``accepted``, ``duplicate``, ``conflict``, ``refused``, ``unavailable`` or ``unconfirmed``"""

    # consumers
    RECEIVED = "received"
    """a receive was answered, with ``count`` deliveries"""
    BLIND = "blind"
    """a receive failed or was cancelled: something may have been handed out that nobody saw"""
    DELIVERED = "delivered"
    """one delivery was seen"""
    ADOPTED = "adopted"
    """one delivery moved to this process, its receipt unchanged"""
    REVOKED = "revoked"
    """this process was told that a receipt of its own has ended"""
    SETTLE = "settle"
    """called, for one receipt: ``verb`` is ack, redeliver, lost, dead_letter or retry (with ``due``)"""
    SETTLED = "settled"
    """answered: ``ok``, ``duplicate``, ``dead``, ``lease_lost`` or ``unknown``"""
    EXECUTED = "executed"
    """a worker's handler began on a delivery: its side effect"""
    CLOSE = "close"
    """called: a subscription is closed, and what it holds is handed back"""
    CLOSED = "closed"

    # operators; each with ``count`` or ``outcome`` as it applies
    RETRY = "retry"
    """a retry from afar, without a delivery in hand, with ``due``"""
    RETRIED = "retried"
    REDRIVE = "redrive"
    DISCARD = "discard"
    CANCEL = "cancel"
    PURGE = "purge"

    # settings that rules depend on
    SETTINGS = "settings"
    """from here on for ``key``: ``name`` is max_losses; limit, rate or burst, for all or for each ``tenant_``; fair,
    floor, shards or max_processing; or weight, of the tenant ``target``. ``value`` is its value, none if there is none
    or nobody knows it for now"""
    PAUSE = "pause"
    PAUSED = "paused"
    """confirmed, at ``store_at``"""
    RESUME = "resume"

    # callbacks and slots
    CALLBACK = "callback"
    """one attempt for ``task``: ``receipt`` is its webhook-id, ``outcome`` what came of it"""
    CALLBACK_ENDED = "callback_ended"
    """the callback of ``task`` has reached its final state ``outcome``"""
    SLOT_TAKEN = "slot_taken"
    """``name`` is the slot, ``receipt`` its holder's token"""
    SLOT_FREED = "slot_freed"

    # processes and faults, noted by the world (``target`` is whom it hit)
    STARTED = "started"
    """``wall`` is how far the wall clock is ahead of the monotonic one"""
    KILLED = "killed"
    FROZEN = "frozen"
    THAWED = "thawed"
    ENDED = "ended"
    CUT = "cut"
    """the target cannot reach the store from here on"""
    MENDED = "mended"
    FAULT = "fault"
    """``name`` began"""
    HEALED = "healed"
    """``name`` is over"""
    PHASE = "phase"
    """``name``: load, faults, heal, quiesce, done"""
    ERROR = "error"
    """something that must not happen: ``note`` says what"""


class Event(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One thing that happened. Fields that do not apply stay empty."""

    at: float
    """monotonic seconds"""
    by: str
    """the process: a name that no other start has"""
    what: What
    call: int = 0
    """pairs a call with its answer, within one process"""
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
    """a digest, enough to tell two apart"""
    ordering_key: str = ""
    tenant: str = ""
    not_before: float | None = None
    deadline: float | None = None
    due: float | None = None
    store_at: float | None = None
    """the store's time: of the hand-out, of the confirmation"""
    wall: float | None = None
    value: float | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class Log:
    """Appends the events of one process to its file, each with one write."""

    def __init__(self, path: Path, by: str) -> None:
        """Open ``path``, which other processes must not write to while its lines are to be read in order."""
        self.by = by
        self._calls = itertools.count(1)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def next_call(self) -> int:
        """Return a number for a call and its answer."""
        return next(self._calls)

    def note(self, what: What, **fields: Any) -> Event:
        """Append one event, timed now."""
        event = Event(at=time.monotonic(), by=self.by, what=what, **fields)
        os.write(self._file, _encoder.encode(event) + b"\n")
        return event

    def about(self, delivery: Delivery, what: What, **fields: Any) -> None:
        """Append what happened to a delivery."""
        self.note(
            what,
            key=delivery.task.key,
            task=delivery.task.id,
            receipt=delivery.receipt,
            attempt=delivery.attempt,
            **fields,
        )

    def came(self, delivery: Delivery, what: What = What.DELIVERED) -> None:
        """Append that a delivery came to this process, with all that it tells."""
        self.about(
            delivery,
            what,
            losses=delivery.losses,
            prior=delivery.prior,
            store_at=delivery.delivered_at,
        )

    def started(self) -> None:
        """Note the start of this process, and how its clocks stand to each other."""
        self.note(What.STARTED, wall=time.time() - time.monotonic())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> Iterator[Event]:
    """Yield the events of one file. A last line that its writer's death cut short is passed over."""
    content = path.read_bytes()
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        yield _decoder.decode(line)


def merge(paths: Iterable[Path]) -> list[Event]:
    """Return the events of several files in the order in which they happened."""
    return sorted((event for path in paths for event in read(path)), key=lambda event: event.at)
