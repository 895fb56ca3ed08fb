"""The data of the contract: tasks, deliveries and what is known about them. All of it is frozen.

Times are Unix seconds of the store's clock. A payload is JSON text in bytes: the publisher encodes
it once, the worker decodes it once, and everything in between forwards the bytes.
"""

from __future__ import annotations

import secrets
from enum import StrEnum
from functools import lru_cache
from typing import Any, Self

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import (
    LIMITS,
    check_encoded,
    check_headers,
    check_json,
    check_name,
    check_time,
    kind_of,
)

__all__ = [
    "DEFAULT_PRIORITY",
    "Confirmation",
    "DeadLetter",
    "Delivery",
    "Expired",
    "Failure",
    "Health",
    "Ledger",
    "Published",
    "QueueStats",
    "Received",
    "Refusal",
    "Settled",
    "State",
    "Task",
    "TaskStatus",
    "WorkerInfo",
    "encode_json",
    "new_id",
    "stored_task",
]

DEFAULT_PRIORITY = 5
_PRIORITIES = range(10)
_MAX_ATTEMPTS = range(1, 1001)
_EXPRESSIBLE = "a value that JSON can express: no NaN, no bytes, text as keys, no cycles"
_BYTES = (bytes, bytearray, memoryview)
_NULL = b"null"
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def new_id() -> str:
    """Return a fresh task id: 128 random bits as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def encode_json(field: str, value: object) -> bytes:
    """Encode ``value`` as JSON text that decodes to what was meant.

    Tuples and sets become arrays, dataclasses objects, dates and UUIDs text. Raises `InvalidInput`,
    naming ``field``, for what JSON cannot say: NaN and infinity, bytes, keys that are not text,
    cycles, lone surrogates.
    """
    try:
        text = _encoder.encode(value)
        check_encoded(field, text, LIMITS.payload)  # that it is JSON is proved by decoding it
        # The encoder writes NaN as null, bytes as base64 and turns keys into text, without a word.
        decoded = _decoder.decode(text)
        said = decoded == value or _same(decoded, msgspec.to_builtins(value, builtin_types=_BYTES))
    except InvalidInput:
        raise
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidInput(field, kind_of(value), _EXPRESSIBLE) from error
    if not said:
        raise InvalidInput(field, kind_of(value), _EXPRESSIBLE)
    return text


def _same(value: object, meant: object) -> bool:
    if isinstance(value, dict) and isinstance(meant, dict):
        return value.keys() == meant.keys() and all(_same(value[key], meant[key]) for key in value)
    if isinstance(value, list) and isinstance(meant, list | tuple):
        return len(value) == len(meant) and all(map(_same, value, meant))
    return value == meant


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work. Checked when it is made: an invalid one raises `InvalidInput` and cannot exist."""

    key: str
    """the kind of work; names the queue"""
    payload: bytes = _NULL
    """JSON text"""
    id: str = msgspec.field(default_factory=new_id)
    """unique within its key; publishing it again is harmless"""
    headers: dict[str, str] = {}
    """short text that travels along: trace context, content hints"""
    priority: int = DEFAULT_PRIORITY
    """0 to 9; a higher class is delivered first"""
    tenant: str | None = None
    """the customer that it belongs to, for fair queueing"""
    ordering_key: str | None = None
    """tasks with the same one run one after another"""
    deadline: float | None = None
    """never delivered at or after this time"""
    not_before: float | None = None
    """never delivered before this time"""
    max_attempts: int | None = None
    """overrides the queue's own; 1 means no retries"""

    def __post_init__(self) -> None:
        """Check every field."""
        check_name("key", self.key)
        check_name("id", self.id)
        if self.payload is not _NULL:
            check_json("payload", self.payload, LIMITS.payload)
        if self.headers != {}:
            check_headers("headers", self.headers)
            # the caller's may change
            msgspec.structs.force_setattr(self, "headers", dict(self.headers))
        if type(self.priority) is not int or self.priority not in _PRIORITIES:
            raise InvalidInput("priority", f"{kind_of(self.priority)} out of range", "0 to 9")
        if self.tenant is not None:
            check_name("tenant", self.tenant)
        if self.ordering_key is not None:
            check_name("ordering_key", self.ordering_key)
        if self.deadline is not None:
            check_time("deadline", self.deadline)
        if self.not_before is not None:
            check_time("not_before", self.not_before)
        attempts = self.max_attempts
        if attempts is not None and (type(attempts) is not int or attempts not in _MAX_ATTEMPTS):
            raise InvalidInput("max_attempts", f"{kind_of(attempts)} out of range", "1 to 1000")

    @classmethod
    def of(cls, key: str, payload: object = None, **fields: Any) -> Self:
        """Make a task from a Python value that JSON can express."""
        text = encode_json("payload", payload)
        task = cls(key=key, **fields)
        msgspec.structs.force_setattr(task, "payload", text)  # it needs no second check
        return task

    def value(self) -> Any:
        """Decode the payload. Raises `InvalidInput` for a number that Python cannot hold, as ``1e999``."""
        try:
            return _decoder.decode(self.payload)
        except (ValueError, RecursionError) as error:
            raise InvalidInput("payload", "a number out of range", "64-bit floats") from error


@lru_cache(maxsize=4096)
def _plain(key: str, priority: int) -> Task:
    return Task(key=key, priority=priority)


def stored_task(key: str, task_id: str, priority: int, payload: bytes) -> Task:
    """Make a task of nothing but these, as one that was stored: its fields were checked then, and are not again."""
    task: Task = _plain(key, priority).__copy__()  # type: ignore[attr-defined] # msgspec has it, untyped
    msgspec.structs.force_setattr(task, "id", task_id)
    msgspec.structs.force_setattr(task, "payload", payload)
    msgspec.structs.force_setattr(task, "headers", {})
    return task


class State(StrEnum):
    """Where an entry is. `docs/lifecycle.md` draws the arrows."""

    SCHEDULED = "scheduled"
    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    DEAD = "dead"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DISCARDED = "discarded"

    @property
    def live(self) -> bool:
        """Whether the entry may still be delivered."""
        return self in (State.SCHEDULED, State.WAITING, State.IN_FLIGHT)


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One entry as it was given to one subscription."""

    task: Task
    receipt: str
    """opaque and unguessable; ends at most once"""
    attempt: int
    """from 1; grows only by a scheduled retry"""
    losses: int = 0
    """how often this entry was lost with its consumer"""
    prior: int = 0
    """attempts spent before the last redrive; the retry policy counts from there"""
    delivered_at: float
    waiting_since: float | None = None
    """since when it had been waiting: published, due or released; ``None`` if that is unknown"""
    shard: int | None = None
    """the shard of its queue that it is from; ``None`` where the queue has but one"""
    shard_changed: bool = False
    """the delivery of this queue before, to the same subscription, was from another shard"""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one receive."""

    deliveries: tuple[Delivery, ...] = ()
    again: bool = False
    """more may be had at once"""
    due_at: float | None = None
    """when the next thing is known to fall due, if nothing else happens before"""
    expired: tuple[Expired, ...] = ()
    """entries that this call found past their deadline and moved to ``expired``"""


class Expired(msgspec.Struct, frozen=True):
    """A task that ended because its deadline passed."""

    key: str
    task_id: str
    attempt: int


class Settled(StrEnum):
    """What became of one settlement in a batch."""

    OK = "ok"
    DEAD = "dead"
    """released as lost once too often, so it became a dead letter"""
    LEASE_LOST = "lease_lost"

    @property
    def ok(self) -> bool:
        """Whether the settlement took effect (now, or when it was sent before)."""
        return self is not Settled.LEASE_LOST


class Published(StrEnum):
    """What became of one published task."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """this very task is known already; there is still exactly one copy"""
    CONFLICT = "conflict"
    """the id belongs to a task with another payload; nothing was changed"""
    REFUSED = "refused"
    """no room; nothing was stored"""


class Refusal(StrEnum):
    """Why a task was refused, for programs."""

    QUEUE_FULL = "queue_full"
    """the queue has its ``capacity`` of tasks that were never delivered"""
    TENANT_FULL = "tenant_full"
    """the tenant has its ``tenant_capacity`` of tasks that were never delivered"""
    INTAKE_PAUSED = "intake_paused"
    """an operator holds the queue's publishers up"""
    MOVED = "moved"
    """the queue is closed for good: its tasks go elsewhere"""
    STORE_FULL = "store_full"
    """the store has no room for anything"""


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """The store's word on one published task."""

    key: str
    task_id: str
    status: Published
    position: int | None = None
    """number of waiting tasks before it, if the backend knows"""
    code: Refusal | None = None
    """why it was refused, for programs"""
    reason: str | None = None
    """why it was refused, for people"""
    retry_after: float | None = None
    """seconds after which a retry is likely to succeed; ``None`` for a refused task if waiting does not help"""
    depth: int | None = None
    """how many tasks counted against the capacity when it was refused for that"""

    @property
    def stored(self) -> bool:
        """Whether the task is in the store, by this call or an earlier one."""
        return self.status in (Published.ACCEPTED, Published.DUPLICATE)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failed attempt or loss in a task's history."""

    attempt: int
    at: float
    error: str


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was given up, kept for a human."""

    task: Task
    attempt: int
    losses: int
    reason: str
    failed_at: float
    history: tuple[Failure, ...] = ()
    """the last failures, oldest first"""


class TaskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows about one task."""

    key: str
    task_id: str
    state: State
    attempt: int
    losses: int
    updated_at: float
    progress: float | str | None = None
    error: str | None = None
    """the last failure, or the reason of the end"""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of entries of one queue, or a sum over queues, taken in one step."""

    published: int = 0
    waiting: int = 0
    scheduled: int = 0
    in_flight: int = 0
    done: int = 0
    dead: int = 0
    expired: int = 0
    cancelled: int = 0
    discarded: int = 0

    @property
    def imbalance(self) -> int:
        """Published minus everything that can be accounted for: 0, always (law 1)."""
        accounted: int = sum(getattr(self, state.value) for state in State)
        return self.published - accounted

    @property
    def balanced(self) -> bool:
        """Whether every published entry is accounted for."""
        return self.imbalance == 0

    def __add__(self, other: Ledger) -> Ledger:
        """Sum two ledgers; each balances, so their sum does."""
        return Ledger(**{f: getattr(self, f) + getattr(other, f) for f in self.__struct_fields__})


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """One queue at a glance."""

    key: str
    ledger: Ledger
    oldest_waiting: float | None = None
    """since when the oldest waiting task has been waiting, Unix seconds"""
    delivered: int = 0
    redelivered: int = 0
    """releases and losses"""
    retried: int = 0
    lost: int = 0
    subscribers: int = 0


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker identity, over all of its connections."""

    worker_id: str
    connections: int
    keys: tuple[str, ...]
    in_flight: int
    since: float
    """when its oldest open connection began"""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a backend can serve, and what it says about itself."""

    ok: bool
    backend: str
    details: dict[str, str | int | float | bool | None] = {}
