"""A task queue with pluggable backends; all backends pass the same conformance tests."""

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
from taskqueue_core.reconcile import Reconciled, reconcile
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
