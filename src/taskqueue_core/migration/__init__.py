"""Blue/green migration between two backends while publishers and workers run; see docs/migration.md.

Each queue exists on two sides, the old and the new backend. One side accepts new tasks. On the other side, the queue
is closed (`QueueSettings.moved_to`) and drained, but it still detects duplicate ids.
"""

from taskqueue_core.migration.backend import MigratingBackend
from taskqueue_core.migration.routing import MigrationMode, MigrationPhase
from taskqueue_core.migration.steps import (
    MigrationStatus,
    QueueOnTheMove,
    finish,
    rollback,
    start,
    status,
)

__all__ = [
    "MigratingBackend",
    "MigrationMode",
    "MigrationPhase",
    "MigrationStatus",
    "QueueOnTheMove",
    "finish",
    "rollback",
    "start",
    "status",
]
