"""Bodies of requests and responses of the HTTP API; the OpenAPI document is built from them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.protocol.frames import WireTask, to_wire_task
from taskqueue_core.rate_limit import IntervalUnit
from taskqueue_core.tasks import (
    Confirmation,
    DeadLetter,
    Failure,
    QueueStats,
    TaskStatus,
    WorkerInfo,
)
from taskqueue_server.routing.schemas import Instant, Name, Seconds, Text

IdList = Annotated[list[Name], Meta(max_length=LIMITS.batch)]


class ConfirmationOut(Confirmation, frozen=True, kw_only=True, omit_defaults=True):
    """The result of publishing one task."""

    @classmethod
    def of(cls, confirmation: Confirmation) -> ConfirmationOut:
        """Convert a confirmation. Fields that the backend does not report are omitted in the response."""
        return cls(  # by name, because a conversion takes three times as long
            key=confirmation.key,
            task_id=confirmation.task_id,
            status=confirmation.status,
            position=confirmation.position,
            code=confirmation.code,
            reason=confirmation.reason,
            retry_after=confirmation.retry_after,
            depth=confirmation.depth,
            existing_id=confirmation.existing_id,
        )


class InvalidLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An invalid line of a batch; the other lines are processed."""

    line: int
    status: str = msgspec.field(default_factory=lambda: "invalid")
    code: str
    field: str | None = None
    detail: str


class Ids(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ids of tasks to look up."""

    ids: IdList


def checked_ids(ids: list[str]) -> tuple[str, ...]:
    """Return the ids without duplicates. Raises `InvalidInput`."""
    for task_id in ids:
        check_name("ids", task_id)
    return tuple(dict.fromkeys(ids))


class Count(msgspec.Struct, frozen=True):
    """The number of tasks affected."""

    count: int


class RescheduleIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another time for a task: ``at``, or ``delay`` seconds from now."""

    at: Instant | None = None
    delay: Seconds | None = None


class Rescheduled(msgspec.Struct, frozen=True):
    """Whether the task has another time now; not if it is running or has ended, or if its attempt was delivered."""

    rescheduled: bool


class Cancelled(msgspec.Struct, frozen=True):
    """Whether the task was live and has been cancelled."""

    cancelled: bool


class Closed(msgspec.Struct, frozen=True):
    """Whether the task is a batch that has not ended; it accepts no more members."""

    closed: bool


class StatusesOut(msgspec.Struct, frozen=True):
    """Statuses by id; null for unknown tasks."""

    statuses: dict[str, TaskStatus | None]


class RateLimitOut(msgspec.Struct, frozen=True):
    """A token bucket of ``max_tokens``, which refills evenly over the interval; each delivery takes a token."""

    max_tokens: int
    interval: int = 1
    interval_unit: IntervalUnit = IntervalUnit.SECONDS


class FlowOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits, delivery order, pauses, bindings and shards of a queue; settings with their default value are omitted."""

    capacity: int | None = None
    max_inflight: int | None = None
    rate_limit: RateLimitOut | None = None
    paused: bool = False
    intake_paused: bool = False
    moved_to: str | None = None
    max_processing_time: float | None = None
    timeout: float | None = None
    order: Order = Order.FIFO
    weighted: int = 0
    """number of tenants with a weight"""
    paused_tenants: int = 0
    """number of paused tenants"""
    tenant_capacity: int | None = None
    tenant_max_inflight: int | None = None
    tenant_rate_limit: RateLimitOut | None = None
    floor_share: float = 0
    bound_to: tuple[str, ...] = ()
    shards: int = 1

    @classmethod
    def of(cls, settings: QueueSettings) -> FlowOut:
        """Convert the settings of a queue. Settings for which this class has no field are dropped."""
        fields = settings.flow | settings.ordering | {"bound_to": settings.bound_to}
        fields["weighted"] = len(settings.weights)
        fields["paused_tenants"] = len(settings.paused_tenants)
        fields["shards"] = settings.shards
        return msgspec.convert(fields, cls)


class QueueOut(QueueStats, frozen=True, kw_only=True):
    """Statistics and limits of one queue."""

    flow: FlowOut

    @classmethod
    def of(cls, stats: QueueStats, settings: QueueSettings) -> QueueOut:
        """Combine the statistics and the settings of a queue."""
        figures = {name: getattr(stats, name) for name in stats.__struct_fields__}
        return cls(**figures, flow=FlowOut.of(settings))


class QueuesOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of queues, sorted by name. If there is a ``next``, pass it as ``after`` for the next page."""

    queues: list[QueueOut]
    next: str | None = None


class WorkersOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of workers with an open subscription, on any replica.

    If there is a ``next``, pass it as ``after`` for the next page.
    """

    workers: list[WorkerInfo]
    next: str | None = None


class LedgerOut(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tasks by state. ``imbalance`` is ``published`` minus the tasks in all states, and should be 0."""

    published: int
    blocked: int
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


class HealthOut(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the store works."""

    ok: bool
    backend: str
    version: str
    details: dict[str, str | int | float | bool | None]


class AliveOut(msgspec.Struct, frozen=True, kw_only=True):
    """Confirms that this process answers."""

    alive: bool = True
    version: str


class ReadyOut(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this server accepts work, and if not, why."""

    ready: bool
    reason: str


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions, all of which must hold. Set at least one, but not both ``failed_before`` and ``older_than``."""

    reason: Text | None = None
    """the reason must be exactly this text"""
    error: Text | None = None
    """the last error must contain this text"""
    failed_before: Instant | None = None
    """the task must have failed before this time, in Unix seconds"""
    older_than: Seconds | None = None
    """the task must have failed at least this many seconds ago"""


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dead letters to act on: those with these ids, those that match a filter, or all.

    To select all, set ``all`` to true. ``after`` is the ``next`` of the previous response, and requires a filter.
    """

    ids: IdList | None = None
    all: bool = False
    filter: LetterFilter | None = None
    after: Name | None = None

    def checked(self) -> tuple[str, ...]:
        """Return the ids without duplicates; empty if ``all`` or a filter was selected. Raises `InvalidInput`."""
        ways = sum((self.all, self.ids is not None, self.filter is not None))
        if ways > 1:
            raise InvalidInput("all", "more than one of all, ids and filter", "exactly one of them")
        if self.after is not None:
            check_name("after", self.after)
            if self.filter is None:
                raise InvalidInput("after", "a cursor without a filter", "a cursor with a filter")
        if self.all or self.filter is not None:
            return ()
        if not self.ids:
            raise InvalidInput("ids", "no ids", 'at least one id, a filter, or "all": true')
        return checked_ids(self.ids)


class Acted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The number of dead letters affected. If there is a ``next``, repeat the request with it as ``after``."""

    count: int
    next: str | None = None


class DeadLetterOut(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was given up, with its history."""

    task: WireTask
    attempt: int
    losses: int
    reason: str
    failed_at: float
    history: tuple[Failure, ...]

    @classmethod
    def of(cls, dead_letter: DeadLetter) -> DeadLetterOut:
        """Convert a dead letter without copying its payload."""
        fields = msgspec.structs.asdict(dead_letter) | {"task": to_wire_task(dead_letter.task)}
        return cls(**fields)


class DeadLettersOut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of dead letters, oldest first. If there is a ``next``, more may follow, even if the page is empty."""

    dead_letters: list[DeadLetterOut]
    next: str | None = None
