"""Workers, which receive tasks and call handlers for them: ``from taskqueue_worker import Worker``."""

from taskqueue_core.loading import needs_extra

with needs_extra("worker"):
    from taskqueue_core.application.context import Context
    from taskqueue_worker.base import BaseWorker
    from taskqueue_worker.load import load_worker
    from taskqueue_worker.local_worker import LocalWorker
    from taskqueue_worker.outcomes import Reject, Retry
    from taskqueue_worker.quarantine import Quarantine, WorkerQuarantined
    from taskqueue_worker.server_link import WorkerRefused
    from taskqueue_worker.server_worker import Worker

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
