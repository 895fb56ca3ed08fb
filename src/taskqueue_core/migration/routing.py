"""The routing of a migration: queue settings in both stores decide which side accepts a queue's new tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import TypeVar

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.composite.backend import Member, QueuePart, ReceivePlan
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.tasks import QueueStats

T = TypeVar("T")

OLD, NEW = 0, 1
MARKER = "_taskqueue.migration"
"""name of an internal queue whose settings record the phase, and the side that accepts tasks for unknown queues"""
_WORD = "backend:"
_REMEMBERED = 1.0
"""seconds for which the phase is cached; using an outdated phase does no harm"""
_POLL_SECONDS = 0.1
"""seconds between checks of whether the drained side is empty, while the other side waits for it to be empty"""
_LATER = 1.0
"""seconds between checks of the phase, while neither side waits for the other side"""
_OF_THE_STORE = ("version", "moved_to", "durability", "replicas", "journal", "shards")
"""settings of a queue that may differ between the two sides"""


class MigrationMode(StrEnum):
    """Which property has priority while both sides have tasks: availability or order."""

    AVAILABLE = "available"
    """the new backend accepts and delivers tasks even while the old backend still has tasks or is unavailable"""
    STRICT = "strict"
    """order and limits are preserved: the side that accepts tasks delivers none until the drained side is empty"""


class MigrationPhase(StrEnum):
    """How far a migration has progressed."""

    IDLE = "idle"
    """not started; the old side has all tasks"""
    STARTED = "started"
    """the new side accepts tasks; the old side is being drained"""
    FINISHED = "finished"
    """the old side remains closed; it was found empty, or the finish was forced"""
    ROLLED_BACK = "rolled_back"
    """the old side accepts tasks; the new side is being drained"""
    INTERRUPTED = "turning"
    """a start or a rollback was interrupted; the command must be repeated"""

    @property
    def towards(self) -> int:
        """The number of the side that accepts new tasks in this phase."""
        return NEW if self in (MigrationPhase.STARTED, MigrationPhase.FINISHED) else OLD


def ours(settings: QueueSettings) -> bool:
    """Return whether the queue was closed by a migration, not by an operator."""
    return settings.moved_to is not None and settings.moved_to.startswith(_WORD)


def only_open_side(settings: Sequence[QueueSettings]) -> int | None:
    """Return the side on which a queue is open; ``None`` if it is open on both sides or closed on both."""
    closed = [ours(value) for value in settings]
    return None if closed[OLD] == closed[NEW] else int(closed[OLD])


class MigrationRouter:
    """Reads and changes the settings that decide which side accepts the tasks of a queue.

    Outdated cached values do no harm: a closed side refuses the task, and the caller calls `forget` and reads again.
    """

    def __init__(
        self, members: tuple[Member, Member], mode: MigrationMode, patience: float
    ) -> None:
        self.members = members
        self.mode = mode
        self.patience = patience
        """seconds to wait for an answer from an optional side"""
        self.copied_to: dict[str, tuple[str, ...]] = {}
        """for each queue, the names of the queues that receive copies of its tasks, as this process last read them"""
        self._open: dict[str, int] = {}
        self._phase: tuple[float, MigrationPhase] | None = None
        self._empty_since: dict[QueuePart, float] = {}

    def is_optional(self, number: int) -> bool:
        """Return whether the migration works without a side: in mode ``available``, without the side being drained."""
        return self.mode is MigrationMode.AVAILABLE and number == self.old_member

    async def ask(self, number: int, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call to a side. Raises `BackendUnavailable` if an optional side answers too late."""
        member = self.members[number]
        return await (member.within(self.patience, call) if self.is_optional(number) else call())

    @property
    def old_member(self) -> int:
        """The number of the side that is being drained, according to the cached phase."""
        return OLD if self._phase is None else 1 - self._phase[1].towards

    async def read(self, key: str) -> list[QueueSettings]:
        return await gather_all(
            self.ask(number, partial(member.control.settings, key))
            for number, member in enumerate(self.members)
        )

    async def phase(self, *, fresh: bool = False) -> MigrationPhase:
        """Return the phase of the migration. It is cached for a second; with ``fresh``, it is read again at once."""
        now = asyncio.get_running_loop().time()
        if self._phase is None or fresh or now >= self._phase[0] + _REMEMBERED:
            self._phase = now, await self._read_phase()
        return self._phase[1]

    async def _read_phase(self) -> MigrationPhase:
        try:
            new = await self._marker(NEW)
        except BackendUnavailable:
            if self.mode is MigrationMode.STRICT or ours(await self._marker(OLD)):
                raise
            # The migration was rolled back or never started. In both cases, the old side is open.
            return MigrationPhase.ROLLED_BACK
        if not new.version:
            return MigrationPhase.IDLE
        if not ours(new):
            return MigrationPhase.FINISHED if new.paused else MigrationPhase.STARTED
        old = await self._marker(OLD)
        return MigrationPhase.INTERRUPTED if ours(old) else MigrationPhase.ROLLED_BACK

    async def _marker(self, number: int) -> QueueSettings:
        return await self.members[number].control.settings(MARKER)

    async def authority(self, key: str) -> tuple[int, QueueSettings]:
        """Return the side whose settings for a queue are in force, and these settings."""
        phase = await self.phase()
        try:
            members = await self.read(key)
        except BackendUnavailable:
            alive = await self._without(key, phase.towards)
            return alive, await self.members[alive].control.settings(key)
        number = only_open_side(members)
        number = phase.towards if number is None else number
        return number, members[number]

    async def open_side(self, key: str) -> int | None:
        """Return the side that accepts the new tasks of a queue; ``None`` while the queue changes sides."""
        if key in self._open:
            return self._open[key]
        phase = await self.phase()
        try:
            members = await self.read(key)
        except BackendUnavailable:
            return await self._without(key, phase.towards)
        number = only_open_side(members)
        if number is None and not ours(members[OLD]):  # a new queue is open on both sides
            number = phase.towards
            if phase is not MigrationPhase.IDLE:
                await self.close(key, 1 - number)
        if number is not None:
            self._open[key] = number
            self.copied_to[key] = members[number].bound_to
        return number

    async def _without(self, key: str, number: int) -> int:
        """Return ``number`` if that side can accept tasks without the other; otherwise raise `BackendUnavailable`."""
        if self.mode is MigrationMode.AVAILABLE:
            settings = await self.members[number].control.settings(key)
            if not ours(settings):
                return number  # not cached, because the other side may become available again
        raise BackendUnavailable("one of the two backends of the migration is unavailable")

    def forget(self, key: str) -> None:
        """Discard the cached side of a queue, so that its settings are read again."""
        self._open.pop(key, None)

    async def _update(self, number: int, key: str, **changes: object) -> None:
        await change_settings(
            self.members[number].control, key, lambda settings: settings.model_copy(update=changes)
        )

    async def close(self, key: str, number: int) -> None:
        """Close a queue on one side to new tasks. That side still detects duplicates of the ids that it knows."""
        await self._update(number, key, moved_to=_WORD + self.members[1 - number].name)

    async def reopen(self, key: str, number: int) -> None:
        """Open a queue on one side, unless an operator has closed it. The other side must be closed."""
        await change_settings(
            self.members[number].control,
            key,
            lambda value: value.model_copy(update={"moved_to": None}) if ours(value) else value,
        )

    async def turn(self, key: str, number: int) -> None:
        """Move a queue to side ``number``: close it on the other side first, so that only one side accepts tasks."""
        await self.close(key, 1 - number)
        await self.reopen(key, number)
        self._open[key] = number

    async def turn_all(self, number: int) -> None:
        """Make one side accept the tasks of all queues that do not exist yet."""
        await self.close(MARKER, 1 - number)
        await self._update(number, MARKER, moved_to=None, paused=False)
        new = await self._marker(NEW)
        # A version above 0 records that the migration was started.
        if number == NEW and not new.version:
            await self.members[NEW].control.configure(MARKER, new)
        self._phase = None
        self._open.clear()

    async def seal(self) -> None:
        """Record that the migration is finished."""
        await self._update(NEW, MARKER, paused=True)
        self._phase = None

    async def mirror(self, key: str, settings: QueueSettings, number: int) -> None:
        """Copy the settings of a queue to one side, except those that may differ between the sides."""

        def edit(result: QueueSettings) -> QueueSettings:
            return settings.model_copy(update={n: getattr(result, n) for n in _OF_THE_STORE})

        await change_settings(self.members[number].control, key, edit)

    async def strict_plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return the parts that may deliver in mode ``strict``, with the parts on the drained side first."""
        phase = await self.phase()
        results = await gather_all(self._strict_parts(key, phase) for key in keys)
        parts = [part for parts in results for part in parts]
        held = any(len(parts) == 1 for parts in results) and phase is not MigrationPhase.IDLE
        return ReceivePlan(
            tuple(sorted(parts, key=lambda part: part.member == phase.towards)),
            _POLL_SECONDS if held else _LATER,
        )

    async def _strict_parts(self, key: str, phase: MigrationPhase) -> tuple[QueuePart, ...]:
        towards = phase.towards
        if phase is MigrationPhase.IDLE:
            return (QueuePart(towards, key),)
        part = QueuePart(1 - towards, key)
        try:
            members = await self.read(key)
            stats = await self.members[part.member].control.stats(key)
        except BackendUnavailable:  # the drained side may still have tasks, so the other side waits
            return (part,)
        if await self._passed(part, members, stats):
            return (part, QueuePart(towards, key))
        return (part,)

    async def _passed(
        self, part: QueuePart, members: list[QueueSettings], stats: QueueStats
    ) -> bool:
        """Return whether the drained side of a queue is empty, and its rate limit allows the other side to deliver."""
        ledger, towards = stats.ledger, 1 - part.member
        # Blocked tasks do not count: they may wait for tasks of the other side.
        live = ledger.waiting or ledger.scheduled or ledger.in_flight
        # A queue that was never used on the drained side stays empty: the first publish closes that side.
        used = stats.delivered or ledger.published
        if live or (used and only_open_side(members) != towards):
            self._empty_since.pop(part, None)
            return False
        limit = members[part.member].rate_limit
        if limit is None or not stats.delivered:
            return True
        now = self.members[towards].backend.now()
        return now >= self._empty_since.setdefault(part, now) + limit.period
