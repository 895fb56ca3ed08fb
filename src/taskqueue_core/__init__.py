"""A task queue with pluggable backends; all backends pass the same conformance tests."""

from taskqueue_core.application.applying import Applied, Difference
from taskqueue_core.application.call import Call, Middleware
from taskqueue_core.application.codecs import Codec, CodecChain, Fernet, Zlib
from taskqueue_core.application.context import Context
from taskqueue_core.application.declared_schedules import AppliedSchedule, ScheduleChange
from taskqueue_core.application.dependencies import Depends, Shared, current
from taskqueue_core.application.errors import (
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
from taskqueue_core.application.handles import Handle, SyncHandle, as_completed, gather
from taskqueue_core.application.policies import QueueLimits
from taskqueue_core.application.registry import Tasks
from taskqueue_core.application.rules import Reject, Retry, Snooze
from taskqueue_core.application.task_function import TaskFunction
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
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.reconcile import Reconciled, reconcile
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.schedule_status import ScheduleStatus
from taskqueue_core.schedules import Cron, Every, Instant, Schedule, TaskTemplate
from taskqueue_core.sync import SyncQueue, connect_sync
from taskqueue_core.tasks import Confirmation, Delivery, Ledger, State, Task, TaskStatus
from taskqueue_core.uniqueness import Debounce, Unique, UniqueKey

__all__ = [
    "Applied",
    "AppliedSchedule",
    "BackendUnavailable",
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
    "Every",
    "Fernet",
    "Handle",
    "IdConflict",
    "Instant",
    "InvalidArguments",
    "InvalidInput",
    "InvalidResult",
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
    "Schedule",
    "ScheduleChange",
    "ScheduleStatus",
    "Shared",
    "Snooze",
    "State",
    "SyncHandle",
    "SyncQueue",
    "Task",
    "TaskCancelled",
    "TaskDead",
    "TaskDiscarded",
    "TaskExpired",
    "TaskFailed",
    "TaskFunction",
    "TaskQueueError",
    "TaskStatus",
    "TaskTemplate",
    "Tasks",
    "Undecodable",
    "Unique",
    "UniqueKey",
    "UnknownTask",
    "WouldBlock",
    "Zlib",
    "as_completed",
    "connect",
    "connect_sync",
    "current",
    "gather",
    "hookimpl",
    "reconcile",
]
