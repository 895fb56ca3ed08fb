"""Workflows: tasks that wait for one another, stored as one task, which servers and local workers expand into steps."""

from taskqueue_core.workflows.expansion import STEP_HEADER, WORKFLOW_HEADER, levels, tasks_of
from taskqueue_core.workflows.inputs import count_references, input_reference, with_inputs
from taskqueue_core.workflows.status import StepStatus, WorkflowState, WorkflowStatus
from taskqueue_core.workflows.steps import (
    InvalidWorkflow,
    WorkflowStep,
    check_step_name,
    check_workflow_id,
    checked_steps,
    step_id,
)
from taskqueue_core.workflows.stored import (
    WORKFLOWS,
    Stored,
    cancel_id,
    cancel_task,
    graph_of,
    is_part,
    manifest_tasks,
    part_ids,
    read_stored,
    steps_in,
)

__all__ = [
    "STEP_HEADER",
    "WORKFLOWS",
    "WORKFLOW_HEADER",
    "InvalidWorkflow",
    "StepStatus",
    "Stored",
    "WorkflowState",
    "WorkflowStatus",
    "WorkflowStep",
    "cancel_id",
    "cancel_task",
    "check_step_name",
    "check_workflow_id",
    "checked_steps",
    "count_references",
    "graph_of",
    "input_reference",
    "is_part",
    "levels",
    "manifest_tasks",
    "part_ids",
    "read_stored",
    "step_id",
    "steps_in",
    "tasks_of",
    "with_inputs",
]
