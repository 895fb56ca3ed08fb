"""The commands of a migration. The stores record the progress, so any process may repeat an interrupted command."""

from __future__ import annotations

import msgspec

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import dependencies_of, has
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import InvalidInput, TaskQueueError
from taskqueue_core.migration.backend import MigratingBackend
from taskqueue_core.migration.routing import MARKER, NEW, OLD, MigrationPhase, MigrationRouter, ours

_SIDES = ("old", "new")


class MigrationUnfinished(TaskQueueError):
    """The migration cannot be finished yet: tasks remain on the drained side, or a start or rollback is incomplete."""

    code = "migration_unfinished"


class QueueOnTheMove(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one queue in a migration."""

    key: str
    takes_in: str | None
    """name of the side that accepts new tasks, ``old`` or ``new``; ``None`` while the queue changes sides"""
    blocked: int
    waiting: int
    scheduled: int
    in_flight: int
    dead: int
    """number of dead letters; like the four counts above, it counts tasks on the drained side"""
    moved: int
    """number of tasks published on the side that is not being drained"""

    @property
    def empty(self) -> bool:
        """Whether no tasks of the queue are left on the drained side."""
        live = self.blocked or self.waiting or self.scheduled or self.in_flight
        return not (live or self.dead)


class MigrationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a migration."""

    phase: MigrationPhase
    leaves: str
    """name of the side that is being drained, ``old`` or ``new``"""
    queues: tuple[QueueOnTheMove, ...]
    remembered: float
    """seconds for which the drained side may still be needed to detect duplicate ids after it is empty"""
    uncarried: bool = False
    """whether the drained side has lines about ended tasks for which others wait; a server carries them"""

    @property
    def open_queues(self) -> tuple[str, ...]:
        """The queues whose new tasks do not go to the intended side yet; empty before the migration starts."""
        target = _SIDES[1 - _SIDES.index(self.leaves)]
        turned = self.phase is not MigrationPhase.IDLE
        return tuple(queue.key for queue in self.queues if turned and queue.takes_in != target)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The queues that still have tasks on the drained side."""
        return tuple(queue.key for queue in self.queues if not queue.empty)


async def start(backend: MigratingBackend) -> MigrationStatus:
    """Copy all settings to the new side, then make that side accept the new tasks of each queue.

    Raises `InvalidInput` if the new side does not support the settings of a queue. The error names the queue, and no
    queue is closed.
    """
    router = backend.router
    for key in await _queues(router, OLD):
        await _copy(router, key)
    await _turn(router, NEW)
    return await status(backend)


async def rollback(backend: MigratingBackend, *, force: bool = False) -> MigrationStatus:
    """Make the old side accept the new tasks of each queue again.

    With ``force``, only open the old side, and do not call the new side, which must be lost for good.
    """
    router = backend.router
    if not force:
        if await router.phase(fresh=True) is not MigrationPhase.IDLE:
            await _turn(router, OLD)
        return await status(backend)
    for key in (MARKER, *await _queues(router, OLD)):
        await router.reopen(key, OLD)
    return MigrationStatus(phase=MigrationPhase.ROLLED_BACK, leaves="new", queues=(), remembered=0)


async def finish(backend: MigratingBackend, *, force: bool = False) -> MigrationStatus:
    """Finish a migration. Raises `MigrationUnfinished` if it cannot be finished; ``force`` ignores remaining tasks."""
    result = await status(backend)
    if result.phase in (MigrationPhase.IDLE, MigrationPhase.INTERRUPTED) or result.open_queues:
        raise MigrationUnfinished(
            f"the migration (phase: {result.phase.value}) cannot be finished until its start or rollback is complete"
        )
    if result.unfinished and not force:
        batch = ", ".join(result.unfinished[:5])
        raise MigrationUnfinished(
            f"the {result.leaves} backend still has tasks; queues with tasks: {len(result.unfinished)} ({batch}); "
            "wait until it is empty, or force the finish"
        )
    if result.uncarried and not force:
        raise MigrationUnfinished(
            f"the {result.leaves} backend has reports for tasks that wait for others: let a server that is configured "
            "for the migration run until they are carried, or force the finish"
        )
    if result.phase is MigrationPhase.STARTED:
        await backend.router.seal()
    return await status(backend)


async def status(backend: MigratingBackend) -> MigrationStatus:
    """Return the progress of every queue. Raises `BackendUnavailable` if either backend is unavailable."""
    router = backend.router
    phase = await router.phase(fresh=True)
    remaining = 1 - phase.towards
    keys = sorted({*await _queues(router, OLD), *await _queues(router, NEW)})
    queues: list[QueueOnTheMove] = []
    remembered = 0.0
    for key in keys:
        settings = [await member.control.settings(key) for member in router.members]
        ledgers = await gather_all(member.control.ledger(key) for member in router.members)
        closed = [ours(setting) for setting in settings]
        left = ledgers[remaining]
        queues.append(
            QueueOnTheMove(
                key=key,
                takes_in=None if all(closed) else _SIDES[closed.index(False)],
                blocked=left.blocked,
                waiting=left.waiting,
                scheduled=left.scheduled,
                in_flight=left.in_flight,
                dead=left.dead,
                moved=ledgers[phase.towards].published,
            )
        )
        remembered = max(remembered, settings[remaining].dedupe_window)
    drained = router.members[remaining].backend
    uncarried = has(drained, Capability.AFTER) and await dependencies_of(drained).lines(1)
    return MigrationStatus(
        phase=phase,
        leaves=_SIDES[remaining],
        queues=tuple(queues),
        remembered=remembered,
        uncarried=bool(uncarried),
    )


async def _queues(router: MigrationRouter, number: int) -> list[str]:
    return [key for key in await router.members[number].control.queues() if key != MARKER]


async def _copy(router: MigrationRouter, key: str) -> None:
    """Copy the settings of a queue to the new side, unless that side has settings of its own."""
    old, new = [await member.control.settings(key) for member in router.members]
    if not old.version or new.version:
        return
    moved = old.model_copy(update={"version": 0, "moved_to": None})
    try:
        await router.members[NEW].control.configure(key, moved)
    except InvalidInput as error:
        raise InvalidInput(f"{key}: {error.field}", error.got, error.allowed) from None


async def _turn(router: MigrationRouter, number: int) -> None:
    """Make one side accept the tasks of queues that do not exist yet, then those of all queues that exist by then."""
    await router.turn_all(number)
    turned: set[str] = set()
    while True:
        matches = {*await _queues(router, OLD), *await _queues(router, NEW)}
        if matches <= turned:
            return
        for key in sorted(matches - turned):
            await router.turn(key, number)
        turned |= matches
