"""A task queue with pluggable backends; all backends pass the same conformance tests."""

from taskqueue_core.errors import (
    BackendUnavailable,
    IdConflict,
    InvalidInput,
    LeaseLost,
    PublishUnconfirmed,
    QueueFull,
    TaskQueueError,
)
from taskqueue_core.hooks import hookimpl
from taskqueue_core.queue import Queue, connect
from taskqueue_core.reconcile import Reconciled, reconcile
from taskqueue_core.sync import SyncQueue, connect_sync
from taskqueue_core.tasks import Confirmation, Delivery, Ledger, Task

__all__ = [
    "BackendUnavailable",
    "Confirmation",
    "Delivery",
    "IdConflict",
    "InvalidInput",
    "LeaseLost",
    "Ledger",
    "PublishUnconfirmed",
    "Queue",
    "QueueFull",
    "Reconciled",
    "SyncQueue",
    "Task",
    "TaskQueueError",
    "connect",
    "connect_sync",
    "hookimpl",
    "reconcile",
]
