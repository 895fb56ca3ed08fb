"""The data types of the contract: tasks, deliveries, results of calls, and statistics. All of them are immutable.

Times are Unix seconds of the store's clock. A payload is JSON text; publishers encode it, and only workers decode it.
"""

from __future__ import annotations

import secrets
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import force_setattr as set_field

from taskqueue_core.after import After, TaskRef, check_after
from taskqueue_core.errors import InvalidInput
from taskqueue_core.json_text import encode_json
from taskqueue_core.limits import (
    check_digest,
    check_headers,
    check_json,
    check_name,
    check_tags,
    check_time,
    kind_of,
)
from taskqueue_core.statistics import Health, Ledger, QueueStats, WorkerInfo
from taskqueue_core.task_state import State
from taskqueue_core.uniqueness import UniqueKey, check_unique

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
    "checked_task",
    "encoded_task",
    "new_id",
]

DEFAULT_PRIORITY = 5
_PRIORITIES, _ATTEMPTS = range(10), range(1, 1001)
_NULL = b"null"
_decoder = msgspec.json.Decoder()


def new_id() -> str:
    """Return a new task id: 128 random bits as 32 hexadecimal digits."""
    return secrets.token_hex(16)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work. The constructor checks all fields and copies the headers. Raises `InvalidInput`.

    >>> task = Task(key="mail", payload=b'{"to": "ada"}', id="welcome-ada", priority=7)
    """

    key: str
    """the name of the queue"""
    payload: bytes = _NULL
    """the input for the work, as JSON text"""
    id: str = msgspec.field(default_factory=new_id)
    """id that is unique within the queue; publishing another task with the same id stores no second copy"""
    headers: dict[str, str] = {}
    """short texts that are delivered with the task, such as a trace context"""
    priority: int = DEFAULT_PRIORITY
    """priority from 0 to 9; tasks with a higher number are delivered first"""
    tenant: str | None = None
    """the customer that the task belongs to; with fair order, tenants take turns"""
    ordering_key: str | None = None
    """tasks with the same ordering key run one at a time, in the order in which they were published"""
    deadline: float | None = None
    """time after which the task is no longer delivered, in Unix seconds"""
    not_before: float | None = None
    """time before which the task is not delivered, in Unix seconds"""
    max_attempts: int | None = None
    """maximum number of attempts, instead of the queue's setting; 1 means no retries"""
    unique: UniqueKey | None = None
    """key that at most one live task of the queue holds; needs the capability ``unique``"""
    after: After | None = None
    """other tasks that the task waits for in the state ``blocked``; needs the capability ``after``"""
    batch: TaskRef | None = None
    """the batch that the task is a member of, or the task itself if it is a batch; needs the capability ``after``"""
    tags: tuple[str, ...] = ()
    """texts such as ``user:42``, by which the task can be found if the queue's setting ``index`` names them"""
    content_digest: bytes | None = None
    """16 to 64 bytes by which the store recognises the id, instead of the payload, which differs if encrypted again

    They are the same for the same content. A task with such a digest is never a repetition of one without.
    """

    def __post_init__(self) -> None:
        check_name("key", self.key)
        check_name("id", self.id)
        if self.payload is not _NULL:
            check_json("payload", self.payload, "payload")
        if self.headers != {}:
            check_headers("headers", self.headers)
            set_field(self, "headers", dict(self.headers))
        if type(self.priority) is not int or self.priority not in _PRIORITIES:
            got = "int out of range" if type(self.priority) is int else kind_of(self.priority)
            raise InvalidInput("priority", got, "a whole number from 0 to 9")
        if self.tenant is not None:
            check_name("tenant", self.tenant)
        if self.ordering_key is not None:
            check_name("ordering_key", self.ordering_key)
        if self.deadline is not None:
            check_time("deadline", self.deadline)
        if self.not_before is not None:
            check_time("not_before", self.not_before)
        attempts = self.max_attempts
        if attempts is not None and (type(attempts) is not int or attempts not in _ATTEMPTS):
            got = f"{kind_of(attempts)} out of range"
            raise InvalidInput("max_attempts", got, "a whole number from 1 to 1000")
        if (
            self.tags != ()
            or self.unique is not None
            or self.after is not None
            or self.batch is not None
            or self.content_digest is not None
        ):
            self._check_rare_fields()

    def _check_rare_fields(self) -> None:
        check_tags("tags", self.tags)
        if self.unique is not None:
            check_unique(self.unique, self.not_before, self.ordering_key)
        check_after(self.after, self.batch, TaskRef(self.key, self.id))
        if self.content_digest is not None:
            check_digest("content_digest", self.content_digest)

    @staticmethod
    def of(key: str, payload: object = None, **fields: Any) -> Task:
        """Return a task whose payload is ``payload`` encoded as JSON. Raises `InvalidInput`, as `encode_json` does."""
        return encoded_task(key, encode_json("payload", payload), **fields)

    def value(self) -> Any:
        """Return the decoded payload. Raises `InvalidInput` if it contains a number out of range, such as ``1e999``."""
        try:
            return _decoder.decode(self.payload)
        except (ValueError, RecursionError) as error:
            raise InvalidInput("payload", "a number out of range", "64-bit floats") from error

    @property
    def size(self) -> int:
        """The number of bytes of the payload and the headers."""
        size = len(self.payload)
        return (
            size + sum(len((k + v).encode()) for k, v in self.headers.items())
            if self.headers
            else size
        )


@lru_cache(maxsize=4096)
def _plain(key: str, priority: int) -> Task:
    return Task(key=key, priority=priority)


def encoded_task(key: str, text: bytes, **fields: Any) -> Task:
    """Return a task whose payload is JSON text that was checked before. Raises `InvalidInput`."""
    set_field(task := Task(key=key, **fields), "payload", text)
    return task


def checked_task(key: str, task_id: str, priority: int, payload: bytes) -> Task:
    """Return a task whose other fields have their defaults. These four were checked before."""
    task: Task = _plain(key, priority).__copy__()  # type: ignore[attr-defined] # defined by msgspec, without a type
    set_field(task, "id", task_id)
    set_field(task, "payload", payload)
    set_field(task, "headers", {})
    return task


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The handover of a task to a subscription.

    >>> _ = await queue.publish("mail", {"to": "ada"})
    >>> async with queue.subscribe("mail", consumer="reader") as subscription:
    ...     (delivery,) = (await subscription.receive(1, 5)).deliveries
    ...     print(delivery.attempt, delivery.task.payload)
    ...     await subscription.ack(delivery)
    1 b'{"to":"ada"}'
    (<Settled.OK: 'ok'>,)
    """

    task: Task
    receipt: str
    """unguessable token that identifies the delivery and can settle it once"""
    attempt: int
    """number of the attempt, starting at 1; only a scheduled retry increases it"""
    losses: int = 0
    """number of earlier deliveries of this attempt whose consumers crashed or stopped responding"""
    prior: int = 0
    """number of earlier attempts that do not count against ``max_attempts``: those before the last redrive, snoozes"""
    delivered_at: float
    waiting_since: float | None = None
    """time at which the task became available, after a release or loss up to ``delivered_at``; ``None`` if not known"""
    shard: int | None = None
    """number of the shard that the task came from; ``None`` if its queue is not sharded"""
    shard_changed: bool = False
    """whether the subscription's previous delivery from this queue came from another shard"""
    timeout: float | None = None
    """seconds after which the worker must end the attempt, as the queue's settings say; ``None`` means no limit"""
    inputs: tuple[bytes | None, ...] = ()
    """results of the parents in `After.inputs`, in their order; ``None`` for a parent that has no result

    It is empty if the task has no such parents, and for a redriven task whose inputs were larger than allowed.
    """

    @property
    def size(self) -> int:
        """The number of bytes of the task and of what comes with it: the inputs, and the names of the parents."""
        size, after = self.task.size, self.task.after
        if self.inputs:
            size += sum(len(each or b"") for each in self.inputs)
        if after is not None:
            size += sum(len(ref.key) + len(ref.task_id) for ref in after.tasks)
        return size


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one receive call."""

    deliveries: tuple[Delivery, ...] = ()
    again: bool = False
    """whether another receive call may return more tasks without waiting"""
    due_at: float | None = None
    """time at which the next task will become available, if it is known, in Unix seconds"""
    expired: tuple[Expired, ...] = ()
    """tasks whose deadlines had passed; this call moved them to the state ``expired``"""


class Expired(msgspec.Struct, frozen=True):
    """A task that ended because its deadline passed."""

    key: str
    task_id: str
    attempt: int


class Settled(StrEnum):
    """The result of one settlement in a batch."""

    OK = "ok"
    DEAD = "dead"
    """the task was lost more times than ``max_losses`` allows, and became a dead letter"""
    LEASE_LOST = "lease_lost"

    @property
    def ok(self) -> bool:
        """Whether the settlement took effect, now or when the same call was made before."""
        return self is not Settled.LEASE_LOST


class Published(StrEnum):
    """The result of publishing one task."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """the same task, or one that holds its unique key, is already stored; there is still exactly one copy"""
    REPLACED = "replaced"
    """the task that holds the unique key was never delivered, and now has the contents of this one"""
    CONFLICT = "conflict"
    """another task with the same id but a different payload is stored; it was not changed"""
    REFUSED = "refused"
    """the task was not accepted, for the reason in `Confirmation.code`; nothing was stored"""


class Refusal(StrEnum):
    """The machine-readable reason for refusing a task."""

    QUEUE_FULL = "queue_full"
    """the number of the queue's tasks that were never delivered has reached ``capacity``"""
    TENANT_FULL = "tenant_full"
    """the number of the tenant's tasks that were never delivered has reached ``tenant_capacity``"""
    INTAKE_PAUSED = "intake_paused"
    """an operator has paused publishing to the queue"""
    MOVED = "moved"
    """the queue no longer accepts tasks, because it has moved to another name or backend"""
    STORE_FULL = "store_full"
    """the store is out of memory or disk space"""
    NOT_UNIQUE = "not_unique"
    """another task holds the unique key, and the publish asked to be refused in this case"""
    BATCH_CLOSED = "batch_closed"
    """the batch that the task is a member of was closed"""
    TOO_MANY_PARENTS = "too_many_parents"
    """the queue is bound to so many queues that the copies of the task would wait for too many tasks"""
    PARENT_REFUSED = "parent_refused"
    """a task of the same call that it waits for was not stored; `Queue.publish_many` decides this, not the backend"""


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """The store's response to the publishing of one task.

    >>> confirmation = await queue.publish("mail", {"to": "ada"}, id="welcome-ada")
    >>> confirmation.status, confirmation.stored
    (<Published.ACCEPTED: 'accepted'>, True)
    """

    key: str
    task_id: str
    status: Published
    position: int | None = None
    """number of tasks that were already waiting in the queue; ``None`` if the backend does not know it"""
    code: Refusal | None = None
    """machine-readable reason why the task was refused, if it was"""
    reason: str | None = None
    """human-readable reason why the task was refused, if it was"""
    retry_after: float | None = None
    """seconds after which publishing a refused task again is likely to succeed; ``None`` if waiting does not help"""
    depth: int | None = None
    """number of tasks that counted against the capacity, if the task was refused because the queue was full"""
    existing_id: str | None = None
    """id of the task that holds the unique key, if that is why this task was not stored"""

    @property
    def stored(self) -> bool:
        """Whether the task, or the one that holds its unique key, is in the store after this call."""
        return self.status in (Published.ACCEPTED, Published.DUPLICATE, Published.REPLACED)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failed attempt or loss in a task's history."""

    attempt: int
    at: float
    error: str
    traceback: str | None = None
    """the end of the traceback, with the causes; kept for the last three failures of a task"""
    worker: str | None = None
    """the worker that had the delivery; ``None`` if there was none, or the store does not know it"""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A task that will not be tried again. It is kept until an operator redrives or discards it."""

    task: Task
    attempt: int
    losses: int
    reason: str
    failed_at: float
    history: tuple[Failure, ...] = ()
    """the most recent failures, oldest first"""

    @property
    def size(self) -> int:
        """The number of bytes of the task and, roughly, of the texts of its failures."""
        texts = sum(len(each.error) + len(each.traceback or "") for each in self.history)
        return self.task.size + texts


class TaskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The store's record of one task.

    >>> handle = await resize.using(delay=60).publish("cat.png")
    >>> status = await handle.status()
    >>> status.state is State.SCHEDULED, status.attempt
    (True, 1)
    """

    key: str
    """name of the queue"""
    task_id: str
    """id of the task"""
    state: State
    attempt: int
    """number of the attempt that waits or runs, or was the last one; the first is 1"""
    losses: int
    """number of attempts whose consumer was lost"""
    updated_at: float
    """time of the last change, in Unix seconds"""
    progress: float | str | None = None
    """what the attempt has reported last"""
    error: str | None = None
    """the reason of a dead letter or of a cancelled task, or the text of the last failure of a live task"""
    last_failure: Failure | None = None
    """the last failure in the task's history, in any state"""
    due_at: float | None = None
    """time at which a scheduled task becomes available, by the store's clock; ``None`` in other states"""
    held_by: tuple[TaskRef, ...] = ()
    """the dead letters that hold a blocked task until they are redriven or discarded"""
    waits_for: tuple[TaskRef, ...] = ()
    """tasks that a blocked task still waits for, at most 20, sorted by key and id; ``held_by`` may name others"""
    waits_for_total: int = 0
    """number of tasks that a blocked task still waits for; the members of a batch are not counted"""
