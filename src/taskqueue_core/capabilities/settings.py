"""The settings of a queue, with a version number that detects concurrent changes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from taskqueue_core.errors import SettingsConflict
from taskqueue_core.limits import LIMITS
from taskqueue_core.rate_limit import Number, RateLimit, Whole
from taskqueue_core.retry import RetryPolicy


class Durability(StrEnum):
    """What a store guarantees once it has confirmed a publish or a retry."""

    MEMORY = "memory"
    """the task is in the store's memory"""
    PROCESS = "process"
    """the task survives a crash of the store's process"""
    DISK = "disk"
    """the task survives a power failure"""
    REPLICATED = "replicated"
    """the task survives the loss of the store's machine"""


class Order(StrEnum):
    """The order in which the tasks of one priority are delivered."""

    FIFO = "fifo"
    """tasks are delivered in the order in which they became available"""
    FAIR = "fair"
    """tenants take turns; the tasks of one tenant are delivered in the order in which they became available"""


class Owner(StrEnum):
    """What determines a field of a queue's settings."""

    DECLARED = "declared"
    """the declaration of a task; `taskqueue_core.Tasks.apply` changes the field"""
    OPERATOR = "operator"
    """an operator; `taskqueue_core.Tasks.apply` leaves the field as it is"""


_FLOW = (
    "capacity",
    "max_inflight",
    "rate_limit",
    "paused",
    "intake_paused",
    "moved_to",
    "max_processing_time",
    "timeout",
)
_FAIR = ("weights", "tenant_capacity", "tenant_max_inflight", "tenant_rate_limit")
_TENANTS = (*_FAIR, "paused_tenants")
_ORDER = ("order", *_TENANTS)
_LISTING = ("index", "keep_ended", "keep_ended_most")
_WHOLE = ("capacity", "max_inflight", "rate_limit", *_ORDER, "floor_share", "bound_to")
DECLARABLE = (
    "retry",
    "timeout",
    "result_ttl",
    "capacity",
    "max_inflight",
    "rate_limit",
    "max_processing_time",
    "stream_events",
    "stream_bytes",
    "stream_ttl",
    "order",
    *_FAIR,
    "floor_share",
    *_LISTING,
)
"""fields that the declaration of a task can set; each of them has an owner"""
_Bound = Annotated[Whole, Field(ge=1, le=1_000_000_000)]
_Weight = Annotated[Whole, Field(ge=1, le=1000)]
_Name = Annotated[str, Field(min_length=1, max_length=255)]
_TagName = Annotated[str, Field(min_length=1, max_length=LIMITS.tag)]


class QueueSettings(BaseModel):
    """The settings of one queue. Confirmed changes apply from the next call on (law 9). Durations are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Whole = Field(default=0, ge=0)
    """version number of the settings: 0 for the defaults, increased by 1 with each change"""
    retry: RetryPolicy = RetryPolicy()
    """delays and maximum number of the retries of a task that failed"""
    max_losses: Whole = Field(default=5, ge=0, le=1000)
    """maximum number of times that one attempt may lose its consumer; the next loss makes the task a dead letter"""
    dedupe_window: Number = Field(default=300.0, ge=0, le=30 * 86_400)
    """seconds, counted from the end of a task, in which publishing its id again is a duplicate or a conflict"""
    result_ttl: Number = Field(default=3600.0, ge=0, le=365 * 86_400)
    """seconds for which the result of a task is kept"""
    stream_events: Whole = Field(default=1000, ge=1, le=100_000)
    """maximum number of events that are kept of each task; the oldest are cut first"""
    stream_bytes: Whole = Field(default=1024 * 1024, ge=1024, le=64 * 1024 * 1024)
    """maximum number of bytes of the events that are kept of each task; the newest event is always kept"""
    stream_ttl: Number = Field(default=3600.0, ge=1, le=30 * 86_400)
    """seconds for which the events of a task are kept after it has ended or become a dead letter"""
    queue_ttl: Number = Field(default=86_400.0, ge=60, le=365 * 86_400)
    """seconds for which a queue without subscriptions, tasks and records of ended tasks is kept"""
    durability: Durability | None = None
    """durability of confirmed tasks, which the store must support; ``None``: the store's default"""
    replicas: Whole = Field(default=1, ge=1, le=100)
    """with the durability ``replicated``: number of replicas that must have stored a task before it is confirmed"""
    keep_tracebacks: bool = True
    """whether the history of a task keeps the tracebacks of its last failures; servers and local workers apply it"""
    journal: bool = False
    """whether the backend's journal records every change of state; refused if the backend has no journal"""
    capacity: _Bound | None = None
    """maximum number of accepted, never delivered tasks; others are refused (law 6); ``None`` means no limit"""
    max_inflight: _Bound | None = None
    """maximum number of tasks in flight for all consumers together (law 5); ``None`` means no limit"""
    rate_limit: RateLimit | None = None
    """maximum delivery rate (law 5); ``None`` means no limit"""
    paused: bool = False
    """whether deliveries are paused; publishing continues"""
    intake_paused: bool = False
    """whether new tasks are refused; stored tasks are still delivered"""
    moved_to: _Name | None = None
    """name of the queue that replaces this one; if set, new tasks are refused, but duplicates still detected"""
    max_processing_time: Number | None = Field(default=None, gt=0, le=365 * 86_400)
    """seconds without reported progress after which a delivery counts as lost and its receipt ends"""
    timeout: Number | None = Field(default=None, ge=0.001, le=365 * 86_400)
    """seconds after which the worker ends an attempt, which then counts as failed; it comes with each delivery"""
    order: Order = Order.FIFO
    """order in which tasks of the same priority are delivered; a change applies at once, even to waiting tasks"""
    weights: dict[_Name, _Weight] = Field(default={}, max_length=1000)
    """with fair order: number of turns that a tenant gets for each turn of a tenant that is not listed here"""
    tenant_capacity: _Bound | None = None
    """with fair order: the same limit as `capacity`, for each tenant"""
    tenant_max_inflight: _Bound | None = None
    """with fair order: the same limit as `max_inflight`, for each tenant"""
    tenant_rate_limit: RateLimit | None = None
    """with fair order: the same limit as `rate_limit`, for each tenant"""
    paused_tenants: tuple[_Name, ...] = Field(default=(), max_length=1000)
    """with fair order: names of tenants whose deliveries are paused; publishing continues, as do running tasks"""
    floor_share: Number = Field(default=0, ge=0, le=0.5)
    """share of deliveries that is reserved for each priority with waiting tasks; 0 reserves nothing

    If the shares of n priorities amount to more than all deliveries, each of them has 1/n.
    """
    bound_to: tuple[_Name, ...] = Field(default=(), max_length=100)
    """names of queues that each get a copy of every task published here; this queue stores one only if it is listed"""
    shards: Whole = Field(default=1, ge=1, le=1000)
    """number of shards of the queue, spread over the partitions of the store; each shard has its own order"""
    index: tuple[_TagName, ...] = Field(default=(), max_length=100)
    """names of the tags by which tasks can be found: the part before the first colon, so ``user`` for ``user:42``

    It applies to tasks that are published from then on.
    """
    keep_ended: Number = Field(default=0, ge=0, le=365 * 86_400)
    """seconds, counted from the end of a task, for which it can be listed, even after its id may be used again"""
    keep_ended_most: Whole = Field(default=100_000, ge=1, le=10_000_000)
    """maximum number of ended tasks that `keep_ended` keeps in each state, and in each shard; the oldest go first

    Tasks that are kept for `dedupe_window` or `result_ttl` are counted, but do not go before their time.
    """

    owners: dict[str, Owner] = {}
    """owners of the fields that a declaration or an operator has set; the others: see `owner_of`"""

    @field_validator("owners")
    @classmethod
    def _are_declarable(cls, owners: dict[str, Owner]) -> dict[str, Owner]:
        if not owners.keys() <= set(DECLARABLE):
            raise ValueError(f"only these fields have owners: {', '.join(DECLARABLE)}")
        return owners

    def owner_of(self, name: str) -> Owner | None:
        """Return the owner of a field of `DECLARABLE`; ``None`` if it has its default, which nothing has set."""
        changed = getattr(self, name) != type(self).model_fields[name].default
        return self.owners.get(name) or (Owner.OPERATOR if changed else None)

    @field_validator("index")
    @classmethod
    def _are_tag_names(cls, index: tuple[str, ...]) -> tuple[str, ...]:
        if any(":" in name or not name.isprintable() or name != name.strip() for name in index):
            raise ValueError("the part of a tag before its first colon, in printable text")
        if len(set(index)) < len(index):
            raise ValueError("different names")
        return index

    @field_validator("paused_tenants")
    @classmethod
    def _are_different(cls, tenants: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(tenants)) < len(tenants):
            raise ValueError("different names")
        return tenants

    @model_validator(mode="after")
    def _fits(self) -> QueueSettings:
        if self.shards > 1 and (whole := self.of_the_whole):
            raise ValueError(f"shards: a queue with the setting {whole[0]} cannot have shards")
        if self.order is not Order.FAIR:
            for name in _TENANTS:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} needs order 'fair'")
        return self

    @property
    def of_the_whole(self) -> tuple[str, ...]:
        """The names of the non-default settings that rule out shards, because they apply to the queue as a whole."""
        return tuple(self._changed(_WHOLE))

    @property
    def flow(self) -> dict[str, object]:
        """The settings of flow control whose values are not the defaults; they need the capability ``flow``."""
        return self._changed(_FLOW)

    @property
    def fair_order(self) -> dict[str, object]:
        """The settings of fair order whose values are not the defaults; they need the capability ``fair_order``."""
        return self._changed(_ORDER)

    @property
    def listing(self) -> dict[str, object]:
        """The settings of lists whose values are not the defaults; they need the capability ``listing``."""
        return self._changed(_LISTING)

    @property
    def ordering(self) -> dict[str, object]:
        """The settings of the delivery order whose values are not the defaults, `floor_share` among them."""
        return self._changed((*_ORDER, "floor_share"))

    def _changed(self, names: tuple[str, ...]) -> dict[str, object]:
        values, fields = self.model_dump(), type(self).model_fields
        return {name: values[name] for name in names if getattr(self, name) != fields[name].default}

    def followed_by(self, changed: QueueSettings) -> QueueSettings:
        """Return ``changed`` with the next version. Raises `SettingsConflict` if it is based on another version."""
        if changed.version != self.version:
            raise SettingsConflict(
                f"version {self.version} of the settings is in force, not {changed.version}: read them again"
            )
        return changed.model_copy(update={"version": self.version + 1})
