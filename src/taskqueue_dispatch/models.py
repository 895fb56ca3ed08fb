"""The configuration of a model: how its jobs are executed. Operators change it at run time."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.retry import RetryPolicy

_Seconds = Annotated[float, Field(gt=0, le=7 * 86_400, allow_inf_nan=False)]
_Path = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^/[!\"$-~]*$")]
_MARGIN = 60.0
"""seconds by which a delivery's time limit exceeds ``max_poll_time``, so that ``max_poll_time`` takes effect first"""


class ModelType(StrEnum):
    """How a model's servers return results."""

    SYNC = "sync"
    """the response contains the result"""
    ASYNC = "async"
    """the response contains an id; the result is polled with this id, or pushed by the server"""


class WhenDown(StrEnum):
    """What happens to new jobs while no endpoint of the model is healthy. Queued jobs stay queued in both cases."""

    QUEUE = "queue"
    REFUSE = "refuse"


class ModelConfig(BaseModel):
    """How a model's jobs are sent, retried and limited. Durations are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: ModelType = ModelType.SYNC
    poll_endpoint_template: _Path | None = None
    """path of a job's status, such as ``/status/{id}``; sync models use it only for retries and lost responses"""
    id_field: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """response field with the server's own id for the job; by default ``job_id``, or ``id`` if that is missing"""
    poll_interval: _Seconds = 2.0
    max_poll_time: _Seconds = 600.0
    """maximum duration in seconds of one attempt on the server; a job that takes longer is cancelled, and the attempt
    fails when the server no longer runs it"""
    max_retries: int = Field(default=50, ge=0, le=999)
    """number of retries before a job becomes a dead letter"""
    health_path: _Path = "/health"
    """path of the server's health check"""
    queue_per_slot: int = Field(default=100, ge=0, le=1_000_000)
    """maximum number of waiting jobs for each slot"""
    queue_limit: int = Field(default=1000, ge=0, le=1_000_000_000)
    """maximum number of waiting jobs, whatever the number of slots"""
    order: Order = Order.FIFO
    """order of jobs; with ``fair``, tenants take turns, and ``queue_per_slot`` and ``queue_limit`` limit each tenant"""
    fair_limit: int = Field(default=10_000, ge=1, le=1_000_000_000)
    """with fair order, maximum number of waiting jobs of all tenants together

    If the limit of one tenant is larger, that limit applies instead.
    """
    weights: dict[str, Annotated[int, Field(ge=1, le=1000)]] = Field(default={}, max_length=1000)
    """with fair order, number of turns that a tenant gets for each turn of a tenant without a weight"""
    floor_share: float = Field(default=0.05, ge=0, le=0.5)
    """share of deliveries reserved for each priority with waiting jobs, so that none of them is starved"""
    when_down: WhenDown = WhenDown.QUEUE
    result_ttl: float = Field(default=3600.0, ge=0, le=365 * 86_400, allow_inf_nan=False)

    @field_validator("poll_endpoint_template")
    @classmethod
    def _check_placeholder(cls, template: str | None) -> str | None:
        if template is not None and template.count("{id}") != 1:
            raise ValueError("the path must contain {id} exactly once")
        if template is not None and set("{}") & set(template.replace("{id}", "")):
            raise ValueError("the path must not contain braces except in {id}")
        return template

    def capacity(self, slots: int) -> int:
        """Return the maximum number of waiting jobs for a number of slots; it is 0 if there are no slots."""
        return min(self.queue_limit, self.queue_per_slot * slots)

    def applied_to(self, settings: QueueSettings, slots: int) -> QueueSettings:
        """Return ``settings`` with this configuration applied.

        Fields that the configuration does not cover are unchanged.

        The queue's capacity is at least 1. If the model's capacity is 0, jobs are refused before they reach the queue.
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
