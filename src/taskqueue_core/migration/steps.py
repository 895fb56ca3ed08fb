"""The steps of a migration. One that was killed is given again, by anybody: what is left to do is in the stores."""

from __future__ import annotations

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.concurrency import together
from taskqueue_core.errors import InvalidInput, TaskQueueError
from taskqueue_core.migration.backend import MigratingBackend
from taskqueue_core.migration.routing import MARKER, NEW, OLD, Crossing, Phase, ours
from taskqueue_core.tasks import Ledger

__all__ = [
    "MigrationStatus",
    "MigrationUnfinished",
    "Phase",
    "QueueOnTheMove",
    "finish",
    "rollback",
    "start",
    "status",
]

_SIDES = ("old", "new")


class MigrationUnfinished(TaskQueueError):
    """There are tasks on the side that is left."""

    code = "migration_unfinished"


class QueueOnTheMove(msgspec.Struct, frozen=True, kw_only=True):
    """One queue, as far as it has moved."""

    key: str
    takes_in: str | None
    """the side that takes its new tasks in; ``None``: neither, at this moment"""
    waiting: int
    scheduled: int
    in_flight: int
    dead: int
    """what the side that is left still has"""
    moved: int
    """how many tasks the other side has taken in"""

    @property
    def empty(self) -> bool:
        """Whether nothing of it is left."""
        return not (self.waiting or self.scheduled or self.in_flight or self.dead)


class MigrationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a migration is."""

    phase: Phase
    leaves: str
    """the side that is left"""
    queues: tuple[QueueOnTheMove, ...]
    remembered: float
    """seconds for which the side that is left may still be needed to tell an id that it knows, once it is empty"""

    @property
    def open_queues(self) -> tuple[str, ...]:
        """Return the queues that do not take in where they should."""
        target = _SIDES[1 - _SIDES.index(self.leaves)]
        turned = self.phase is not Phase.IDLE
        return tuple(one.key for one in self.queues if turned and one.takes_in != target)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Return the queues of which something is left."""
        return tuple(one.key for one in self.queues if not one.empty)


async def start(backend: MigratingBackend) -> MigrationStatus:
    """Close the intake of the old side, queue by queue, and open that of the new one. Settings are copied before.

    Raises `InvalidInput` that names the queue whose settings the new side cannot keep; nothing was closed then.
    """
    crossing = backend.crossing
    for key in await _queues(crossing, OLD):
        await _copy(crossing, key)
    await _turn(crossing, NEW)
    return await status(backend)


async def rollback(backend: MigratingBackend, *, force: bool = False) -> MigrationStatus:
    """Close the intake of the new side, queue by queue, and open that of the old one again.

    With ``force`` only the old side is opened: for a new one that is lost, and will not come back by itself.
    """
    crossing = backend.crossing
    if not force:
        if await crossing.phase(fresh=True) is not Phase.IDLE:
            await _turn(crossing, OLD)
        return await status(backend)
    for key in (MARKER, *await _queues(crossing, OLD)):
        await crossing.reopen(key, OLD)
    return MigrationStatus(phase=Phase.ROLLED_BACK, leaves="new", queues=(), remembered=0)


async def finish(backend: MigratingBackend, *, force: bool = False) -> MigrationStatus:
    """Note that nothing is left behind. Raises `MigrationUnfinished` while there is, unless ``force`` is given."""
    found = await status(backend)
    if found.phase in (Phase.IDLE, Phase.TURNING) or found.open_queues:
        raise MigrationUnfinished(
            f"the migration is {found.phase.value}: start it, or roll it back, to its end first"
        )
    if found.unfinished and not force:
        some = ", ".join(found.unfinished[:5])
        raise MigrationUnfinished(
            f"the {found.leaves} side still has tasks, in {len(found.unfinished)} queues: {some}"
        )
    if found.phase is Phase.STARTED:
        await backend.crossing.seal()
    return await status(backend)


async def status(backend: MigratingBackend) -> MigrationStatus:
    """Say what is left where. Raises `BackendUnavailable` where a side is out of reach."""
    crossing = backend.crossing
    phase = await crossing.phase(fresh=True)
    left = 1 - phase.towards
    keys = sorted({*await _queues(crossing, OLD), *await _queues(crossing, NEW)})
    queues: list[QueueOnTheMove] = []
    remembered = 0.0
    for key in keys:
        found = [await side.control.settings(key) for side in crossing.sides]
        ledgers = await together(side.control.ledger(key) for side in crossing.sides)
        queues.append(_one(key, phase, found, ledgers))
        remembered = max(remembered, found[left].dedupe_window)
    return MigrationStatus(
        phase=phase, leaves=_SIDES[left], queues=tuple(queues), remembered=remembered
    )


def _one(
    key: str, phase: Phase, settings: list[QueueSettings], ledgers: list[Ledger]
) -> QueueOnTheMove:
    closed = [ours(one) for one in settings]
    towards = phase.towards
    takes_in = None if all(closed) else _SIDES[closed.index(False)]
    if not any(closed):
        takes_in = _SIDES[OLD]
    left = ledgers[1 - towards]
    return QueueOnTheMove(
        key=key,
        takes_in=takes_in,
        waiting=left.waiting,
        scheduled=left.scheduled,
        in_flight=left.in_flight,
        dead=left.dead,
        moved=ledgers[towards].published,
    )


async def _queues(crossing: Crossing, number: int) -> list[str]:
    return [key for key in await crossing.sides[number].control.queues() if key != MARKER]


async def _copy(crossing: Crossing, key: str) -> None:
    """Give the new side the settings of a queue, where it has none of its own."""
    old, new = [await side.control.settings(key) for side in crossing.sides]
    if not old.version or new.version:
        return
    moved = old.model_copy(update={"version": 0, "moved_to": None})
    try:
        await crossing.sides[NEW].control.configure(key, moved)
    except InvalidInput as error:
        raise InvalidInput(f"{key}: {error.field}", error.got, error.allowed) from None


async def _turn(crossing: Crossing, number: int) -> None:
    """Turn what does not exist yet, then every queue, and those that came up meanwhile."""
    await crossing.turn_all(number)
    turned: set[str] = set()
    while True:
        found = {*await _queues(crossing, OLD), *await _queues(crossing, NEW)}
        if found <= turned:
            return
        for key in sorted(found - turned):
            await crossing.turn(key, number)
        turned |= found
