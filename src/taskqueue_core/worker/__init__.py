"""Run tasks: ``from taskqueue_core.worker import Worker``."""

from taskqueue_core.worker.app import Worker
from taskqueue_core.worker.base import BaseWorker
from taskqueue_core.worker.context import Context
from taskqueue_core.worker.errors import WorkerQuarantined, WorkerRefused
from taskqueue_core.worker.loading import load_worker
from taskqueue_core.worker.local import LocalWorker
from taskqueue_core.worker.outcomes import Reject, Retry
from taskqueue_core.worker.quarantine import Quarantine

__all__ = [
    "BaseWorker",
    "Context",
    "LocalWorker",
    "Quarantine",
    "Reject",
    "Retry",
    "Worker",
    "WorkerQuarantined",
    "WorkerRefused",
    "load_worker",
]
