"""The ``schedules`` during a migration: a schedule is stored on the side that accepts the tasks of its queue."""

from __future__ import annotations

from collections.abc import Sequence

from taskqueue_core.composite.backend import CompositeBackend, QueuePart
from taskqueue_core.composite.schedules import JointSchedules
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.migration.routing import MigrationRouter


class MigratingSchedules(JointSchedules):
    """Implementation of `Schedules` during a migration."""

    def __init__(self, composite: CompositeBackend, router: MigrationRouter) -> None:
        super().__init__(composite)
        self._router = router

    async def _parts(self, key: str, name: str) -> Sequence[QueuePart]:  # noqa: ARG002 - sides depend on the queue only
        number = await self._router.open_side(key)
        if number is None:
            self._router.forget(key)
            raise BackendUnavailable("the queue is being moved to another backend")
        return QueuePart(1 - number, key), QueuePart(number, key)

    async def _close(self, part: QueuePart, key: str) -> None:
        await self._router.close(key, part.member)

    async def _refused(self, key: str) -> None:
        self._router.forget(key)
