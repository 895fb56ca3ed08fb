"""How the jobs of a model are done: the document that operators change at run time."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.retry import RetryPolicy

_Seconds = Annotated[float, Field(gt=0, le=7 * 86_400, allow_inf_nan=False)]
_Path = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^/[!\"$-~]*$")]
_MARGIN = 60.0
"""seconds that a delivery may outlast its polling: to fail by `max_poll_time` comes first"""


class ModelType(StrEnum):
    """How its servers answer."""

    SYNC = "sync"
    """with the result"""
    ASYNC = "async"
    """with an id, by which they are asked until they have it, or which they push it with"""


class WhenDown(StrEnum):
    """What becomes of new jobs while no endpoint of the model is healthy. What is queued stays in any case."""

    QUEUE = "queue"
    REFUSE = "refuse"


class ModelConfig(BaseModel):
    """How a model's jobs are sent, repeated and bounded. Durations are seconds. The defaults are the code's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: ModelType = ModelType.SYNC
    poll_endpoint_template: _Path | None = None
    """where to ask for a job, as ``/status/{id}``, at the endpoint's origin; a sync one is asked before a resubmit"""
    id_field: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """what the server calls its id of a job in its answer; none: ``job_id``, else ``id``"""
    poll_interval: _Seconds = 2.0
    max_poll_time: _Seconds = 600.0
    """the longest that one attempt may run on the server, sync or async; after that it has failed"""
    max_retries: int = Field(default=50, ge=0, le=999)
    """failures of a job after the first one before it goes to the dead letters"""
    health_path: _Path = "/health"
    """where the server's health is asked for, at the endpoint's origin"""
    queue_per_slot: int = Field(default=100, ge=0, le=1_000_000)
    """jobs that may wait, for each slot"""
    queue_limit: int = Field(default=1000, ge=0, le=1_000_000_000)
    """jobs that may wait in all"""
    order: Order = Order.FIFO
    """``fair``: tenants take turns, and each may have as many jobs waiting as there may wait in all otherwise"""
    fair_limit: int = Field(default=10_000, ge=1, le=1_000_000_000)
    """jobs of all tenants that may wait; with fair order"""
    weights: dict[str, Annotated[int, Field(ge=1, le=1000)]] = Field(default={}, max_length=1000)
    """turns of a tenant for each turn of the others; with fair order"""
    floor_share: float = Field(default=0.05, ge=0, le=0.5)
    """the share of slots that the lowest waiting priority gets for sure, so that none starves"""
    when_down: WhenDown = WhenDown.QUEUE
    result_ttl: float = Field(default=3600.0, ge=0, le=365 * 86_400, allow_inf_nan=False)

    @field_validator("poll_endpoint_template")
    @classmethod
    def _check_placeholder(cls, template: str | None) -> str | None:
        if template is not None and template.count("{id}") != 1:
            raise ValueError("it must contain {id} once")
        if template is not None and set("{}") & set(template.replace("{id}", "")):
            raise ValueError("braces are allowed as {id} only")
        return template

    def capacity(self, slots: int) -> int:
        """Return how many jobs may wait for so many slots: 0 for none."""
        return min(self.queue_limit, self.queue_per_slot * slots)

    def applied_to(self, settings: QueueSettings, slots: int) -> QueueSettings:
        """Return the settings of the model's queue; what an operator has set and this says nothing of stays.

        A queue's capacity is 1 at least: who submits to a model without any room is refused before its queue is asked.
        """
        fair, capacity = self.order is Order.FAIR, max(1, self.capacity(slots))
        fields = {
            "retry": RetryPolicy(max_attempts=self.max_retries + 1),
            "result_ttl": self.result_ttl,
            "max_processing_time": self.max_poll_time + _MARGIN,
            "order": self.order,
            "capacity": max(self.fair_limit, capacity) if fair else capacity,
            "tenant_capacity": capacity if fair else None,
            "weights": self.weights if fair else {},
            "floor_share": self.floor_share,
        }
        return QueueSettings.model_validate(settings.model_dump() | fields)
