"""A task queue with pluggable backends; all backends pass the same conformance tests."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskqueue_core.after import After, TaskRef
    from taskqueue_core.application.applying import Applied, Difference
    from taskqueue_core.application.batch import Batch
    from taskqueue_core.application.call import Call
    from taskqueue_core.application.codecs import Codec, CodecChain, Fernet, Zlib
    from taskqueue_core.application.context import Context
    from taskqueue_core.application.declared_schedules import AppliedSchedule, ScheduleChange
    from taskqueue_core.application.dependencies import Depends, Shared, current
    from taskqueue_core.application.errors import (
        EventsGone,
        InvalidArguments,
        InvalidResult,
        NotConnected,
        ResultGone,
        TaskCancelled,
        TaskDead,
        TaskDiscarded,
        TaskExpired,
        TaskFailed,
        Undecodable,
        UnknownTask,
        WouldBlock,
    )
    from taskqueue_core.application.event_reader import Event
    from taskqueue_core.application.handles import Handle, as_completed, gather
    from taskqueue_core.application.middleware import Middleware
    from taskqueue_core.application.policies import QueueLimits, Stream
    from taskqueue_core.application.registry import Tasks
    from taskqueue_core.application.rules import Reject, Retry, Snooze
    from taskqueue_core.application.running_workflow import RunningWorkflow
    from taskqueue_core.application.sync_handles import SyncHandle
    from taskqueue_core.application.task_function import TaskFunction
    from taskqueue_core.application.workflow import Workflow, chain, group
    from taskqueue_core.application.workflow_handle import SyncWorkflowHandle, WorkflowHandle
    from taskqueue_core.application.workflow_step import Step
    from taskqueue_core.capabilities import TaskDetail, TaskPage, TaskSummary
    from taskqueue_core.errors import (
        BackendUnavailable,
        IdConflict,
        InvalidInput,
        LeaseLost,
        NotUnique,
        PublishUnconfirmed,
        QueueFull,
        TaskQueueError,
    )
    from taskqueue_core.hooks import hookimpl
    from taskqueue_core.queue import Queue, connect
    from taskqueue_core.queue_lists import SyncTaskList, TaskList
    from taskqueue_core.rate_limit import RateLimit
    from taskqueue_core.reconciliation import Reconciled, reconcile
    from taskqueue_core.retry import RetryPolicy
    from taskqueue_core.schedule_status import ScheduleStatus
    from taskqueue_core.schedules import Cron, Every, Instant, Schedule, TaskTemplate
    from taskqueue_core.sync import SyncQueue, connect_sync
    from taskqueue_core.tasks import Confirmation, Delivery, Ledger, State, Task, TaskStatus
    from taskqueue_core.uniqueness import Debounce, Unique, UniqueKey
    from taskqueue_core.workflows import (
        InvalidWorkflow,
        StepStatus,
        WorkflowPage,
        WorkflowState,
        WorkflowStatus,
        WorkflowStep,
        WorkflowSummary,
    )

__all__ = [
    "After",
    "Applied",
    "AppliedSchedule",
    "BackendUnavailable",
    "Batch",
    "Call",
    "Codec",
    "CodecChain",
    "Confirmation",
    "Context",
    "Cron",
    "Debounce",
    "Delivery",
    "Depends",
    "Difference",
    "Event",
    "EventsGone",
    "Every",
    "Fernet",
    "Handle",
    "IdConflict",
    "Instant",
    "InvalidArguments",
    "InvalidInput",
    "InvalidResult",
    "InvalidWorkflow",
    "LeaseLost",
    "Ledger",
    "Middleware",
    "NotConnected",
    "NotUnique",
    "PublishUnconfirmed",
    "Queue",
    "QueueFull",
    "QueueLimits",
    "RateLimit",
    "Reconciled",
    "Reject",
    "ResultGone",
    "Retry",
    "RetryPolicy",
    "RunningWorkflow",
    "Schedule",
    "ScheduleChange",
    "ScheduleStatus",
    "Shared",
    "Snooze",
    "State",
    "Step",
    "StepStatus",
    "Stream",
    "SyncHandle",
    "SyncQueue",
    "SyncTaskList",
    "SyncWorkflowHandle",
    "Task",
    "TaskCancelled",
    "TaskDead",
    "TaskDetail",
    "TaskDiscarded",
    "TaskExpired",
    "TaskFailed",
    "TaskFunction",
    "TaskList",
    "TaskPage",
    "TaskQueueError",
    "TaskRef",
    "TaskStatus",
    "TaskSummary",
    "TaskTemplate",
    "Tasks",
    "Undecodable",
    "Unique",
    "UniqueKey",
    "UnknownTask",
    "Workflow",
    "WorkflowHandle",
    "WorkflowPage",
    "WorkflowState",
    "WorkflowStatus",
    "WorkflowStep",
    "WorkflowSummary",
    "WouldBlock",
    "Zlib",
    "as_completed",
    "chain",
    "connect",
    "connect_sync",
    "current",
    "gather",
    "group",
    "hookimpl",
    "reconcile",
]

_MODULES = {
    "After": "taskqueue_core.after",
    "Applied": "taskqueue_core.application.applying",
    "AppliedSchedule": "taskqueue_core.application.declared_schedules",
    "BackendUnavailable": "taskqueue_core.errors",
    "Batch": "taskqueue_core.application.batch",
    "Call": "taskqueue_core.application.call",
    "Codec": "taskqueue_core.application.codecs",
    "CodecChain": "taskqueue_core.application.codecs",
    "Confirmation": "taskqueue_core.tasks",
    "Context": "taskqueue_core.application.context",
    "Cron": "taskqueue_core.schedules",
    "Debounce": "taskqueue_core.uniqueness",
    "Delivery": "taskqueue_core.tasks",
    "Depends": "taskqueue_core.application.dependencies",
    "Difference": "taskqueue_core.application.applying",
    "Event": "taskqueue_core.application.event_reader",
    "EventsGone": "taskqueue_core.application.errors",
    "Every": "taskqueue_core.schedules",
    "Fernet": "taskqueue_core.application.codecs",
    "Handle": "taskqueue_core.application.handles",
    "IdConflict": "taskqueue_core.errors",
    "Instant": "taskqueue_core.schedules",
    "InvalidArguments": "taskqueue_core.application.errors",
    "InvalidInput": "taskqueue_core.errors",
    "InvalidResult": "taskqueue_core.application.errors",
    "InvalidWorkflow": "taskqueue_core.workflows",
    "LeaseLost": "taskqueue_core.errors",
    "Ledger": "taskqueue_core.tasks",
    "Middleware": "taskqueue_core.application.middleware",
    "NotConnected": "taskqueue_core.application.errors",
    "NotUnique": "taskqueue_core.errors",
    "PublishUnconfirmed": "taskqueue_core.errors",
    "Queue": "taskqueue_core.queue",
    "QueueFull": "taskqueue_core.errors",
    "QueueLimits": "taskqueue_core.application.policies",
    "RateLimit": "taskqueue_core.rate_limit",
    "Reconciled": "taskqueue_core.reconciliation",
    "Reject": "taskqueue_core.application.rules",
    "ResultGone": "taskqueue_core.application.errors",
    "Retry": "taskqueue_core.application.rules",
    "RetryPolicy": "taskqueue_core.retry",
    "RunningWorkflow": "taskqueue_core.application.running_workflow",
    "Schedule": "taskqueue_core.schedules",
    "ScheduleChange": "taskqueue_core.application.declared_schedules",
    "ScheduleStatus": "taskqueue_core.schedule_status",
    "Shared": "taskqueue_core.application.dependencies",
    "Snooze": "taskqueue_core.application.rules",
    "State": "taskqueue_core.tasks",
    "Step": "taskqueue_core.application.workflow_step",
    "StepStatus": "taskqueue_core.workflows",
    "Stream": "taskqueue_core.application.policies",
    "SyncHandle": "taskqueue_core.application.sync_handles",
    "SyncQueue": "taskqueue_core.sync",
    "SyncTaskList": "taskqueue_core.queue_lists",
    "SyncWorkflowHandle": "taskqueue_core.application.workflow_handle",
    "Task": "taskqueue_core.tasks",
    "TaskCancelled": "taskqueue_core.application.errors",
    "TaskDead": "taskqueue_core.application.errors",
    "TaskDetail": "taskqueue_core.capabilities",
    "TaskDiscarded": "taskqueue_core.application.errors",
    "TaskExpired": "taskqueue_core.application.errors",
    "TaskFailed": "taskqueue_core.application.errors",
    "TaskFunction": "taskqueue_core.application.task_function",
    "TaskList": "taskqueue_core.queue_lists",
    "TaskPage": "taskqueue_core.capabilities",
    "TaskQueueError": "taskqueue_core.errors",
    "TaskRef": "taskqueue_core.after",
    "TaskStatus": "taskqueue_core.tasks",
    "TaskSummary": "taskqueue_core.capabilities",
    "TaskTemplate": "taskqueue_core.schedules",
    "Tasks": "taskqueue_core.application.registry",
    "Undecodable": "taskqueue_core.application.errors",
    "Unique": "taskqueue_core.uniqueness",
    "UniqueKey": "taskqueue_core.uniqueness",
    "UnknownTask": "taskqueue_core.application.errors",
    "Workflow": "taskqueue_core.application.workflow",
    "WorkflowHandle": "taskqueue_core.application.workflow_handle",
    "WorkflowPage": "taskqueue_core.workflows",
    "WorkflowState": "taskqueue_core.workflows",
    "WorkflowStatus": "taskqueue_core.workflows",
    "WorkflowStep": "taskqueue_core.workflows",
    "WorkflowSummary": "taskqueue_core.workflows",
    "WouldBlock": "taskqueue_core.application.errors",
    "Zlib": "taskqueue_core.application.codecs",
    "as_completed": "taskqueue_core.application.handles",
    "chain": "taskqueue_core.application.workflow",
    "connect": "taskqueue_core.queue",
    "connect_sync": "taskqueue_core.sync",
    "current": "taskqueue_core.application.dependencies",
    "gather": "taskqueue_core.application.handles",
    "group": "taskqueue_core.application.workflow",
    "hookimpl": "taskqueue_core.hooks",
    "reconcile": "taskqueue_core.reconciliation",
}


# The names in ``__all__`` are imported on first use: a command of an operator needs few of them, and starts faster.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
