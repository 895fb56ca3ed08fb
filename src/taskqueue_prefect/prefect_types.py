"""Types of Prefect for annotations. At run time they are `Any`: only a Prefect server may import Prefect's modules."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect.server.models.task_workers import TaskWorkerResponse
    from prefect.server.schemas.core import TaskRun
else:
    TaskRun = TaskWorkerResponse = Any

__all__ = ["TaskRun", "TaskWorkerResponse"]
