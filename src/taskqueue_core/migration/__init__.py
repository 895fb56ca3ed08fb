"""Several places as one queue: blue/green migration between two backends, and shards within one.

A place is a queue of a backend. One place of a queue takes new tasks in; those before it are closed in their stores
(`QueueSettings.moved_to`), still answer for the ids that they know, and run empty. docs/migration.md tells how.
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
