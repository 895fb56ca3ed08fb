"""Blue/green migration between two backends while publishers and workers run: see docs/migration.md.

One of a queue's two sides accepts new tasks. The other is closed in its store (`QueueSettings.moved_to`), still detects
duplicate ids, and is drained.
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
