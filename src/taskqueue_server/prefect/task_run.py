"""Validation of task runs before they are sent to a Prefect worker, which would ack an invalid run and exit."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec

from taskqueue_core.limits import TASK_RUN_BYTES, in_bytes
from taskqueue_core.tasks import Task

_LONGEST = 10_000 * 366 * 86_400.0
Seconds = Annotated[float, msgspec.Meta(ge=-_LONGEST, le=_LONGEST)]


class TaskRunResult(msgspec.Struct, tag_field="input_type", tag="task_run"):
    """An input that is the result of another task run."""

    id: UUID


class FlowRunResult(msgspec.Struct, tag_field="input_type", tag="flow_run"):
    """An input that is the result of a flow run."""

    id: UUID


class Parameter(msgspec.Struct, tag_field="input_type", tag="parameter"):
    """An input that is a parameter of the flow run."""

    name: str


class Constant(msgspec.Struct, tag_field="input_type", tag="constant"):
    """An input whose value does not change."""

    type: str


class TaskRunPolicy(msgspec.Struct):
    """The retry policy that Prefect's engine in the worker applies."""

    max_retries: int = 0
    retry_delay_seconds: float = 0
    retries: int | None = None
    retry_delay: float | list[float] | None = None
    retry_jitter_factor: Annotated[float, msgspec.Meta(ge=0)] | None = None


class StateDetails(msgspec.Struct):
    """The details of the state of a task run."""

    deferred: Literal[True]
    """whether a worker executes the run, instead of the submitting process"""
    flow_run_id: UUID | None = None
    task_run_id: UUID | None = None
    child_flow_run_id: UUID | None = None
    scheduled_time: datetime | None = None
    cache_key: str | None = None
    cache_expiration: datetime | None = None
    untrackable_result: bool = False
    pause_timeout: datetime | None = None
    pause_reschedule: bool = False
    pause_key: str | None = None
    run_input_keyset: dict[str, str] | None = None
    refresh_cache: bool | None = None
    retriable: bool | None = None
    transition_id: UUID | None = None
    task_parameters_id: UUID | None = None
    """id under which the parameters are stored; ``None`` for a run without parameters"""
    traceparent: str | None = None
    deployment_concurrency_lease_id: UUID | None = None


class TaskRunState(msgspec.Struct):
    """The state of a run that waits for a worker."""

    type: Literal["SCHEDULED"]
    state_details: StateDetails
    id: UUID | msgspec.UnsetType = msgspec.UNSET
    created: datetime | None = None
    updated: datetime | None = None
    name: str | None = None
    timestamp: datetime | msgspec.UnsetType = msgspec.UNSET
    message: str | None = None
    data: None = None


class TaskRun(msgspec.Struct):
    """A task run as Prefect writes it. Other fields may exist and have any value."""

    id: UUID
    task_key: str
    dynamic_key: str
    name: str
    state: TaskRunState
    created: datetime | None = None
    updated: datetime | None = None
    flow_run_id: UUID | None = None
    cache_key: str | None = None
    cache_expiration: datetime | None = None
    task_version: str | None = None
    empirical_policy: TaskRunPolicy | msgspec.UnsetType = msgspec.UNSET
    tags: list[str] = []
    labels: dict[str, bool | int | float | str] | None = None
    state_id: UUID | None = None
    task_inputs: dict[str, list[TaskRunResult | FlowRunResult | Parameter | Constant]] = {}
    state_type: Literal["SCHEDULED"] | None = None
    state_name: str | None = None
    run_count: int = 0
    flow_run_run_count: int = 0
    expected_start_time: datetime | None = None
    next_scheduled_start_time: datetime | None = None
    start_time: datetime | None = None
    end_time: datetime | None = None
    total_run_time: Seconds = 0
    estimated_run_time: Seconds = 0
    estimated_start_time_delta: Seconds = 0


_everything = msgspec.json.Decoder()
_task_run = msgspec.json.Decoder(TaskRun)


def refusal(task: Task) -> str | None:
    """Return why a task must not be sent to a worker; ``None`` if it may be sent."""
    if len(task.payload) > TASK_RUN_BYTES:
        return f"the run has {in_bytes(len(task.payload))}; the maximum is {TASK_RUN_BYTES}"
    try:
        # Decode all fields: `TaskRun` skips unknown fields, which must be valid JSON as well.
        _everything.decode(task.payload)
        run = _task_run.decode(task.payload)
    except (ValueError, RecursionError) as error:
        return str(error)
    if run.task_key != task.key:
        return "the task_key of the run differs from the key of its queue"
    return None
