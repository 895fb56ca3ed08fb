"""Why a worker ends other than by being asked to. Each error has the exit code of its process.

::

    TaskQueueError
    ├── WorkerQuarantined           its handlers only fail
    └── ConfigurationError
        └── WorkerRefused           the server will not have it; trying again does not help
"""

from __future__ import annotations

from typing import ClassVar

from taskqueue_core.errors import ConfigurationError, TaskQueueError


class WorkerQuarantined(TaskQueueError):
    """So many attempts failed in a row, probes included, that the fault is likely here and not in the tasks."""

    code = "worker_quarantined"
    exit_code: ClassVar[int] = 3


class WorkerRefused(ConfigurationError):
    """The server refused the connection: wrong token, missing right, or another protocol."""

    code = "worker_refused"
    exit_code: ClassVar[int] = 4
