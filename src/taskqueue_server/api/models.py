"""What requests and answers of the HTTP API look like. The OpenAPI document is made from these."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.protocol.frames import WireTask, to_wire_task
from taskqueue_core.queue import instant
from taskqueue_core.rate_limit import IntervalUnit
from taskqueue_core.tasks import (
    DEFAULT_PRIORITY,
    Confirmation,
    DeadLetter,
    Failure,
    Ledger,
    Published,
    QueueStats,
    Refusal,
    Task,
    TaskStatus,
    WorkerInfo,
    new_id,
)
from taskqueue_server.routing.schemas import (
    Attempts,
    HeadersField,
    Instant,
    Name,
    Priority,
    Seconds,
    Text,
    Token,
)

IdList = Annotated[list[Name], Meta(max_length=LIMITS.batch)]


class TaskIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task to publish.

    ``delay`` and ``expires_in`` are seconds from now, ``not_before`` and ``deadline`` are Unix seconds.
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

    def to_task(self, now: float, task_id: str | None = None) -> Task:
        """Return the checked task; the payload's bytes stay as they came. Raises `InvalidInput`.

        ``task_id`` is its id where it has none of its own; a fresh one without.
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
        )


class RetryIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The next attempt of a task, at a time or after a delay."""

    task: TaskIn
    at: Instant | None = None
    delay: Seconds | None = None
    error: str | None = None
    token: Token | None = None


class RetryTaskIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The next attempt of the task that the path names: at once, at a time, or after a delay.

    Without ``payload`` the task must be dead, for then its payload is known.
    """

    at: Instant | None = None
    delay: Seconds | None = None
    error: str | None = None
    token: Token | None = None
    payload: Raw | msgspec.UnsetType = msgspec.UNSET


class ConfirmationOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The store's word on one task."""

    key: str
    task_id: str
    status: Published
    position: int | None = None
    code: Refusal | None = None
    reason: str | None = None
    retry_after: float | None = None
    depth: int | None = None

    @classmethod
    def of(cls, confirmation: Confirmation) -> ConfirmationOut:
        """Leave out what the backend does not know."""
        return cls(**msgspec.structs.asdict(confirmation))


class InvalidLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a batch that is no valid task; the others are not held up."""

    line: int
    status: str = msgspec.field(default_factory=lambda: "invalid")
    code: str
    field: str | None = None
    detail: str


class Ids(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ids to look up."""

    ids: IdList

    def checked(self) -> tuple[str, ...]:
        """Return the ids without repeats. Raises `InvalidInput`."""
        return checked_ids(self.ids)


def checked_ids(ids: list[str]) -> tuple[str, ...]:
    """Return the ids without repeats. Raises `InvalidInput`."""
    for task_id in ids:
        check_name("ids", task_id)
    return tuple(dict.fromkeys(ids))


class Count(msgspec.Struct, frozen=True):
    """How many."""

    count: int


class Cancelled(msgspec.Struct, frozen=True):
    """Whether the task was live, and is cancelled now."""

    cancelled: bool


class StatusesOut(msgspec.Struct, frozen=True):
    """Statuses by id; null for what is not known."""

    statuses: dict[str, TaskStatus | None]


class RateLimitOut(msgspec.Struct, frozen=True):
    """A token bucket: each hand-out takes a token, an interval fills it."""

    max_tokens: int
    interval: int = 1
    interval_unit: IntervalUnit = IntervalUnit.SECONDS


class FlowOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What limits and orders the flow through a queue; what is not there does not."""

    capacity: int | None = None
    max_inflight: int = 0
    rate_limit: RateLimitOut | None = None
    paused: bool = False
    intake_paused: bool = False
    moved_to: str | None = None
    max_processing_time: float | None = None
    order: Order = Order.FIFO
    weighted: int = 0
    """how many tenants have a weight"""
    tenant_capacity: int | None = None
    tenant_max_inflight: int = 0
    tenant_rate_limit: RateLimitOut | None = None
    floor_share: float = 0
    bound_to: tuple[str, ...] = ()
    shards: int = 1

    @classmethod
    def of(cls, settings: QueueSettings) -> FlowOut:
        """Leave out what is at its default, and the other settings."""
        fields = settings.flow | settings.ordering | {"bound_to": settings.bound_to}
        fields["weighted"] = len(settings.weights)
        fields["shards"] = settings.shards
        return msgspec.convert(fields, cls)


class QueueOut(QueueStats, frozen=True, kw_only=True):
    """One queue at a glance, with its limits."""

    flow: FlowOut

    @classmethod
    def of(cls, stats: QueueStats, settings: QueueSettings) -> QueueOut:
        """Put both together."""
        figures = {name: getattr(stats, name) for name in stats.__struct_fields__}
        return cls(**figures, flow=FlowOut.of(settings))


class QueuesOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of queues at a glance, by name. With ``next`` there are more: ask again, with it as ``after``."""

    queues: list[QueueOut]
    next: str | None = None


class WorkersOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of the workers with an open subscription, on any replica. With ``next`` there are more."""

    workers: list[WorkerInfo]
    next: str | None = None


class LedgerOut(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger with its sum: what is published and not accounted for is the imbalance, and 0."""

    published: int
    waiting: int
    scheduled: int
    in_flight: int
    done: int
    dead: int
    expired: int
    cancelled: int
    discarded: int
    balanced: bool
    imbalance: int

    @classmethod
    def of(cls, ledger: Ledger) -> LedgerOut:
        """Add up."""
        counts = msgspec.structs.asdict(ledger)
        return cls(**counts, balanced=ledger.balanced, imbalance=ledger.imbalance)


class HealthOut(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the store can serve."""

    ok: bool
    backend: str
    version: str
    details: dict[str, str | int | float | bool | None]


class AliveOut(msgspec.Struct, frozen=True, kw_only=True):
    """That this process answers."""

    alive: bool = True
    version: str


class ReadyOut(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this server takes work now, and if not, why."""

    ready: bool
    reason: str


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dead letters for which all of this holds. At least one thing must be said."""

    reason: Text | None = None
    """is the reason, word for word"""
    error: Text | None = None
    """stands in the last error"""
    failed_before: Instant | None = None
    """Unix seconds"""
    older_than: Seconds | None = None
    """failed so many seconds ago, or more"""


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some dead letters: those with these ids, or those that a filter finds, or all.

    Nothing stands for all but saying so. ``after`` goes with a filter: where the answer before said ``next``.
    """

    ids: IdList | None = None
    all: bool = False
    filter: LetterFilter | None = None
    after: Name | None = None

    def checked(self) -> tuple[str, ...]:
        """Return the ids; none means all, or those of the filter. Raises `InvalidInput`."""
        ways = sum((self.all, self.ids is not None, self.filter is not None))
        if ways > 1:
            raise InvalidInput("all", "more than one of all, ids and filter", "one of them")
        if self.after is not None:
            check_name("after", self.after)
            if self.filter is None:
                raise InvalidInput("after", "a cursor", "with a filter only")
        if self.all or self.filter is not None:
            return ()
        if not self.ids:
            raise InvalidInput("ids", "no ids", 'at least one id, or a filter, or "all": true')
        return checked_ids(self.ids)


class Acted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many dead letters moved. With ``next`` there are more to look at: ask again, with it as ``after``."""

    count: int
    next: str | None = None


class DeadLetterOut(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was given up."""

    task: WireTask
    attempt: int
    losses: int
    reason: str
    failed_at: float
    history: tuple[Failure, ...]

    @classmethod
    def of(cls, dead_letter: DeadLetter) -> DeadLetterOut:
        """Share the payload's bytes."""
        fields = msgspec.structs.asdict(dead_letter) | {"task": to_wire_task(dead_letter.task)}
        return cls(**fields)


class DeadLettersOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of dead letters, oldest first. With ``next`` there are more, though the page may be short, or empty."""

    dead_letters: list[DeadLetterOut]
    next: str | None = None
