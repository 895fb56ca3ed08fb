"""The settings of a queue: a versioned resource."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from taskqueue_core.errors import SettingsConflict
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.retry import RetryPolicy

__all__ = ["Durability", "Order", "QueueSettings"]


class Durability(StrEnum):
    """What a confirmation of a publish or retry promises."""

    MEMORY = "memory"
    """it is in the store's memory"""
    PROCESS = "process"
    """it survives a crash of the store's process"""
    DISK = "disk"
    """it survives a power cut"""
    REPLICATED = "replicated"
    """it survives the loss of the store's machine"""


class Order(StrEnum):
    """The order in which the tasks of one priority are delivered."""

    FIFO = "fifo"
    """in the order of becoming available"""
    FAIR = "fair"
    """tenant by tenant in turn, each tenant's tasks in the order of becoming available"""


_FLOW = (
    "capacity",
    "max_inflight",
    "rate_limit",
    "paused",
    "intake_paused",
    "moved_to",
    "max_processing_time",
)
_FAIR = ("weights", "tenant_capacity", "tenant_max_inflight", "tenant_rate_limit")
_ORDER = ("order", *_FAIR, "floor_share")
_WHOLE = ("capacity", "max_inflight", "rate_limit", *_ORDER, "bound_to")
_Many = Annotated[int, Field(ge=0, le=1_000_000_000)]
_Bound = Annotated[int, Field(ge=1, le=1_000_000_000)]
_Weight = Annotated[int, Field(ge=1, le=1000)]
_Name = Annotated[str, Field(min_length=1, max_length=255)]


class QueueSettings(BaseModel):
    """How one queue behaves. Confirmed settings act on the next call (law 9). Durations are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(default=0, ge=0)
    """0 for the defaults; grows by 1 with each change"""
    retry: RetryPolicy = RetryPolicy()
    max_losses: int = Field(default=5, ge=0, le=1000)
    """the poison guard: an entry lost with its consumer more often than this is dead"""
    dedupe_window: float = Field(default=300.0, ge=0, le=30 * 86_400, allow_inf_nan=False)
    """how long after its end a task's id is remembered"""
    result_ttl: float = Field(default=3600.0, ge=0, le=365 * 86_400, allow_inf_nan=False)
    """how long a result is kept"""
    durability: Durability | None = None
    """what a confirmation promises; none: whatever the store does by itself. Refused where it can't be kept"""
    replicas: int = Field(default=1, ge=1, le=100)
    """how many replicas must have a task before it is confirmed, where the durability is ``replicated``"""
    journal: bool = False
    """write every transition into the backend's journal. Refused where there is none"""
    capacity: _Bound | None = None
    """maximum number of accepted tasks that were never delivered; further publishes are refused (law 6)"""
    max_inflight: _Many = 0
    """how many may be in flight, over all consumers; 0 for any number (law 5)"""
    rate_limit: RateLimit | None = None
    """maximum delivery rate (law 5)"""
    paused: bool = False
    """nothing is delivered; publishing continues"""
    intake_paused: bool = False
    """publishing is refused; stored tasks are delivered"""
    moved_to: _Name | None = None
    """closed to new tasks for good, which go to what is named here; known ids are answered as ever"""
    max_processing_time: float | None = Field(
        default=None, gt=0, le=365 * 86_400, allow_inf_nan=False
    )
    """how long a delivery may go on without progress; after that it counts as lost, and its receipt ends"""
    order: Order = Order.FIFO
    """of the tasks of one priority; a change acts at once, on what is waiting too"""
    weights: dict[_Name, _Weight] = Field(default={}, max_length=1000)
    """turns of a tenant for each turn of a tenant without a weight; with fair order"""
    tenant_capacity: _Bound | None = None
    """`capacity`, for each tenant; with fair order"""
    tenant_max_inflight: _Many = 0
    """`max_inflight`, for each tenant; with fair order"""
    tenant_rate_limit: RateLimit | None = None
    """`rate_limit`, for each tenant; with fair order"""
    floor_share: float = Field(default=0, ge=0, le=0.5)
    """the share of deliveries that is reserved for the lowest waiting priority; 0: none while higher ones wait"""
    bound_to: tuple[_Name, ...] = Field(default=(), max_length=100)
    """a task published here is put, as a copy of its own, into each of these queues instead"""

    shards: int = Field(default=1, ge=1, le=1000)
    """over how many partitions of the store it is spread; each keeps its own order"""

    @model_validator(mode="after")
    def _fits(self) -> QueueSettings:
        if self.shards > 1 and (whole := self.of_the_whole):
            raise ValueError(f"shards: a queue with {whole[0]} cannot have shards")
        if self.order is not Order.FAIR:
            for name in _FAIR:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} needs order 'fair'")
        return self

    @property
    def of_the_whole(self) -> tuple[str, ...]:
        """Return the names of what is set and can only be kept where the whole queue is seen in one step."""
        return tuple(self._changed(_WHOLE))

    @property
    def flow(self) -> dict[str, object]:
        """Return what limits the flow and is not at its default: only a backend with ``flow`` keeps that."""
        return self._changed(_FLOW)

    @property
    def ordering(self) -> dict[str, object]:
        """Return the settings of the order of deliveries that differ from their defaults; they need ``order``."""
        return self._changed(_ORDER)

    def _changed(self, names: tuple[str, ...]) -> dict[str, object]:
        values, fields = self.model_dump(), type(self).model_fields
        return {name: values[name] for name in names if getattr(self, name) != fields[name].default}

    def followed_by(self, changed: QueueSettings) -> QueueSettings:
        """Return ``changed`` with the next version. Raises `SettingsConflict` unless it was made from these."""
        if changed.version != self.version:
            raise SettingsConflict(
                f"version {self.version} of the settings is in force, not {changed.version}: read them again"
            )
        return changed.model_copy(update={"version": self.version + 1})
