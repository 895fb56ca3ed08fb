"""Bodies of requests that publish a task or schedule its next attempt."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from taskqueue_core.after import After, OnDead, TaskRef, When
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.queue import instant
from taskqueue_core.tasks import DEFAULT_PRIORITY, Task, new_id
from taskqueue_core.uniqueness import Debounce, OnConflict, UniqueKey, Until
from taskqueue_server.routing.schemas import (
    Attempts,
    ContentDigest,
    HeadersField,
    Instant,
    Label,
    Name,
    Priority,
    Seconds,
    Tags,
    meta_of,
)


class DebounceIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a task that is published again and again: ``seconds`` after the last publish.

    It is due ``max_wait`` seconds after the first publish at the latest.
    """

    seconds: Seconds
    max_wait: Seconds | None = None


class UniqueIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key that at most one live task of the queue holds.

    ``until``: the task holds it until it has ended, or only until it is delivered for the first time; ``period``: also
    for so many seconds after the publish. ``on_conflict``: what a publish does whose key is held.
    """

    key: Name
    until: Until = "ended"
    period: Seconds | None = None
    on_conflict: OnConflict = "keep"
    debounce: DebounceIn | None = None

    def to_key(self) -> UniqueKey:
        """Return the checked key. Raises `InvalidInput`."""
        fields = msgspec.structs.asdict(self)
        if self.debounce is not None:
            fields["debounce"] = Debounce(self.debounce.seconds, self.debounce.max_wait)
        return UniqueKey(**fields)


class RefIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a task: its queue and its id."""

    key: Name
    task_id: Name

    def to_ref(self, field: str) -> TaskRef:
        """Return the checked name. Raises `InvalidInput`, whose field begins with ``field``."""
        check_name(f"{field}.key", self.key)
        check_name(f"{field}.task_id", self.task_id)
        return TaskRef(self.key, self.task_id)


class AfterIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tasks that a task waits for, its parents. The token must permit to read their results.

    ``when``: all of them are done; all have ended, in whatever way; or one has ended otherwise than done. ``on_dead``:
    whether a dead letter holds the task until it is redriven or discarded, or cancels it. ``inputs``: positions in
    ``tasks`` of the parents whose results are delivered with the task.
    """

    tasks: Annotated[list[RefIn], meta_of(minItems=1, maxItems=LIMITS.parents, uniqueItems=True)]
    when: When = "done"
    on_dead: OnDead = "hold"
    inputs: Annotated[list[int], meta_of(maxItems=LIMITS.parents, uniqueItems=True)] = []

    def to_after(self) -> After:
        """Return the checked parents. Raises `InvalidInput`."""
        some = self.tasks[: LIMITS.parents + 1]  # one too many is refused
        refs = tuple([ref.to_ref("after.tasks") for ref in some])
        return After(tasks=refs, when=self.when, on_dead=self.on_dead, inputs=tuple(self.inputs))


class TaskIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task to publish.

    ``delay`` and ``expires_in`` are seconds from now; ``not_before`` and ``deadline`` are Unix seconds.
    """

    key: Name
    payload: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    id: Name | None = None
    headers: HeadersField = {}
    priority: Priority = DEFAULT_PRIORITY
    tenant: Name | None = None
    ordering_key: Name | None = None
    deadline: Instant | None = None
    expires_in: Seconds | None = None
    not_before: Instant | None = None
    delay: Seconds | None = None
    max_attempts: Attempts | None = None
    tags: Tags = ()
    unique: UniqueIn | None = None
    content_digest: ContentDigest | None = None
    """16 to 64 bytes in base64 by which the id is recognised instead of the payload; the same for the same content"""
    after: AfterIn | None = None
    batch: RefIn | None = None
    """the batch that the task is a member of, or the task itself if it is a batch"""

    def to_task(self, now: float, task_id: str | None = None) -> Task:
        """Return the checked task, with the payload's bytes unchanged. Raises `InvalidInput`.

        If the body has no id, the task gets the id ``task_id``, or a random id if ``task_id`` is ``None``.
        """
        return Task(
            key=self.key,
            payload=bytes(self.payload),
            id=self.id if self.id is not None else task_id or new_id(),
            headers=self.headers,
            priority=self.priority,
            tenant=self.tenant,
            ordering_key=self.ordering_key,
            deadline=instant(now, "expires_in", self.expires_in, "deadline", self.deadline),
            not_before=instant(now, "delay", self.delay, "not_before", self.not_before),
            max_attempts=self.max_attempts,
            tags=self.tags,
            unique=None if self.unique is None else self.unique.to_key(),
            content_digest=self.content_digest,
            after=None if self.after is None else self.after.to_after(),
            batch=None if self.batch is None else self.batch.to_ref("batch"),
        )


class RetryIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The next attempt of a task, at a time or after a delay."""

    task: TaskIn
    at: Instant | None = None
    delay: Seconds | None = None
    error: str | None = None
    token: Label | None = None
    free: bool = False
    """whether the attempt before it does not count against the maximum number of attempts"""
    traceback: str | None = None
    """the traceback of ``error``, which the task's history keeps unless the queue's settings exclude it"""


class RetryTaskIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The next attempt of the task that the path names: at once, at a time, or after a delay.

    Without ``payload``, the task must be a dead letter, whose payload is still stored.
    """

    at: Instant | None = None
    delay: Seconds | None = None
    error: str | None = None
    token: Label | None = None
    free: bool = False
    """whether the attempt before it does not count against the maximum number of attempts"""
    traceback: str | None = None
    """the traceback of ``error``, which the task's history keeps unless the queue's settings exclude it"""
    payload: Raw | msgspec.UnsetType = msgspec.UNSET
