"""Workers, which receive tasks and call handlers for them: ``from taskqueue_worker import Worker``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskqueue_core.application.context import Context
    from taskqueue_core.application.rules import Reject, Retry, Snooze
    from taskqueue_worker.base import BaseWorker
    from taskqueue_worker.load import load_worker
    from taskqueue_worker.local_worker import LocalWorker
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
    "Snooze",
    "Worker",
    "WorkerQuarantined",
    "WorkerRefused",
    "load_worker",
]

_MODULES = {
    "BaseWorker": "taskqueue_worker.base",
    "Context": "taskqueue_core.application.context",
    "LocalWorker": "taskqueue_worker.local_worker",
    "Quarantine": "taskqueue_worker.quarantine",
    "Reject": "taskqueue_core.application.rules",
    "Retry": "taskqueue_core.application.rules",
    "Snooze": "taskqueue_core.application.rules",
    "Worker": "taskqueue_worker.server_worker",
    "WorkerQuarantined": "taskqueue_worker.quarantine",
    "WorkerRefused": "taskqueue_worker.server_link",
    "load_worker": "taskqueue_worker.load",
}


# The names in ``__all__`` are imported on first use: pytest imports this package in every run to load its plugin.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from taskqueue_core.loading import needs_extra  # noqa: PLC0415 - as above

    with needs_extra("worker"):
        return getattr(import_module(_MODULES[name]), name)
