"""Which side of a migration takes a queue's new tasks in, as the settings in both stores say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from typing import NamedTuple, TypeVar

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.composite.backend import Member, QueuePart, ReceivePlan
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.tasks import QueueStats

T = TypeVar("T")

OLD, NEW = 0, 1
MARKER = "_taskqueue.migration"
"""the queue whose settings hold for all queues that do not exist yet"""
_WORD = "backend:"
_REMEMBERED = 1.0
"""seconds for which a phase is taken for granted: nothing depends on it being the latest"""
_OF_THE_STORE = ("version", "moved_to", "durability", "replicas", "journal", "shards")
"""settings that each side has for itself"""


class MigrationMode(StrEnum):
    """The priority while both sides have tasks."""

    AVAILABLE = "available"
    """the new backend accepts and delivers tasks even while the old one still has tasks or is unavailable"""
    STRICT = "strict"
    """order and limits hold: a queue's new side waits until its old one is empty"""


class MigrationPhase(StrEnum):
    """How far a migration is."""

    IDLE = "idle"
    """nothing was begun: the old side has everything"""
    STARTED = "started"
    """the new side takes in, the old one runs empty"""
    FINISHED = "finished"
    """the old side was found empty, and is closed"""
    ROLLED_BACK = "rolled_back"
    """the old side takes in, the new one runs empty"""
    INTERRUPTED = "turning"
    """a start or a rollback was interrupted: give the command again"""

    @property
    def towards(self) -> int:
        """Return the side that takes in what is new."""
        return NEW if self in (MigrationPhase.STARTED, MigrationPhase.FINISHED) else OLD


def ours(settings: QueueSettings) -> bool:
    """Whether a migration has closed the queue."""
    return settings.moved_to is not None and settings.moved_to.startswith(_WORD)


class Sides(NamedTuple):
    """The settings of one queue on both sides."""

    old: QueueSettings
    new: QueueSettings

    @property
    def open_side(self) -> int | None:
        """Return the one side that is open where the other is closed."""
        closed = ours(self.old), ours(self.new)
        return None if closed[OLD] == closed[NEW] else int(closed[OLD])

    @property
    def both_closed(self) -> bool:
        """Whether neither takes anything in."""
        return ours(self.old) and ours(self.new)


class MigrationRouter:
    """Reads and turns the settings that say where new tasks go. What it remembers may be out of date, and does no harm.

    A side that is wrongly taken for open refuses; the caller then calls `forget` and reads again.
    """

    def __init__(
        self, members: tuple[Member, Member], mode: MigrationMode, patience: float
    ) -> None:
        """Wait so many seconds for a side that can be done without."""
        self.members = members
        self.mode = mode
        self.patience = patience
        self.copied_to: dict[str, tuple[str, ...]] = {}
        """where the tasks of queues go as copies, as far as this process has read"""
        self._open: dict[str, int] = {}
        self._phase: tuple[float, MigrationPhase] | None = None

    def moved_to(self, number: int) -> str:
        """Return what a queue that is closed on the other side says of where it went."""
        return _WORD + self.members[number].name

    async def ask(self, number: int, call: Callable[[], Awaitable[T]]) -> T:
        """Ask a side; one that can be done without has its time. Raises `BackendUnavailable`."""
        if self.mode is MigrationMode.STRICT or number != self.old_member:
            return await call()
        return await self.members[number].within(self.patience, call)

    @property
    def old_member(self) -> int:
        """The side that is left behind, as far as is known."""
        return OLD if self._phase is None else 1 - self._phase[1].towards

    # reading

    async def read(self, key: str) -> Sides:
        """Return the settings of a queue on both sides."""
        settings = await gather_all(
            self.ask(number, partial(member.control.settings, key))
            for number, member in enumerate(self.members)
        )
        return Sides(*settings)

    async def phase(self, *, fresh: bool = False) -> MigrationPhase:
        """Return how far the migration is. The new side alone can tell that it was started."""
        now = asyncio.get_running_loop().time()
        if self._phase is None or fresh or now >= self._phase[0] + _REMEMBERED:
            self._phase = now, await self._read_phase()
        return self._phase[1]

    async def _read_phase(self) -> MigrationPhase:
        try:
            new = await self.members[NEW].control.settings(MARKER)
        except BackendUnavailable:
            if self.mode is MigrationMode.STRICT or ours(await self._marker(OLD)):
                raise
            # or never begun: the old side is open, and that is all that counts now
            return MigrationPhase.ROLLED_BACK
        if not new.version:
            return MigrationPhase.IDLE
        if not ours(new):
            return MigrationPhase.FINISHED if new.paused else MigrationPhase.STARTED
        return (
            MigrationPhase.INTERRUPTED
            if ours(await self._marker(OLD))
            else MigrationPhase.ROLLED_BACK
        )

    async def _marker(self, number: int) -> QueueSettings:
        return await self.members[number].control.settings(MARKER)

    async def authority(self, key: str) -> tuple[int, QueueSettings]:
        """Return the side whose settings of a queue are in force, and these."""
        phase = await self.phase()
        try:
            members = await self.read(key)
        except BackendUnavailable:
            alive = await self._without(key, phase.towards)
            return alive, await self.members[alive].control.settings(key)
        number = members.open_side
        number = phase.towards if number is None else number
        return number, members[number]

    async def open_side(self, key: str) -> int | None:
        """Return the side that takes a queue's new tasks in; ``None`` while it is on its way from one to the other.

        A queue that has never been used is closed on the side that is left before it is open on the other.
        """
        if key in self._open:
            return self._open[key]
        phase = await self.phase()
        try:
            members = await self.read(key)
        except BackendUnavailable:
            return await self._without(key, phase.towards)
        number = members.open_side
        if number is None and not members.both_closed:
            number = phase.towards
            if phase is not MigrationPhase.IDLE:
                await self.close(key, 1 - number)
        if number is not None:
            self._open[key] = number
            self.copied_to[key] = members[number].bound_to
        return number

    async def _without(self, key: str, number: int) -> int:
        """Return the side that takes in where the other is out of reach, if its own settings say that it does."""
        if self.mode is MigrationMode.AVAILABLE:
            settings = await self.members[number].control.settings(key)
            if not ours(settings):
                return number  # and not remembered: the other one may come back
        raise BackendUnavailable("one of the two backends of the migration is unavailable")

    def forget(self, key: str) -> None:
        """Read a queue's settings again before their next use."""
        self._open.pop(key, None)

    # turning

    async def close(self, key: str, number: int) -> None:
        """Close a queue on a side to new ids. It still answers for those that it knows."""
        name = self.moved_to(1 - number)
        await change_settings(
            self.members[number].control,
            key,
            lambda settings: (
                settings if ours(settings) else settings.model_copy(update={"moved_to": name})
            ),
        )

    async def reopen(self, key: str, number: int) -> None:
        """Open a queue on a side; the other must be closed."""
        await change_settings(
            self.members[number].control,
            key,
            lambda settings: (
                settings.model_copy(update={"moved_to": None}) if ours(settings) else settings
            ),
        )

    async def turn(self, key: str, number: int) -> None:
        """Have a side take a queue's new tasks in, and the other none. At no time do both."""
        await self.close(key, 1 - number)
        await self.reopen(key, number)
        self._open[key] = number

    async def turn_all(self, number: int) -> None:
        """Have a side take in what belongs to queues that do not exist yet."""
        await self.close(MARKER, 1 - number)
        await change_settings(
            self.members[number].control,
            MARKER,
            lambda settings: settings.model_copy(update={"moved_to": None, "paused": False}),
        )
        new = await self.members[NEW].control.settings(MARKER)
        # a first change, so that it says that there was a start
        if number == NEW and not new.version:
            await self.members[NEW].control.configure(MARKER, new)
        self._phase = None
        self._open.clear()

    async def seal(self) -> None:
        """Note that the side that was left has been found empty."""
        await change_settings(
            self.members[NEW].control,
            MARKER,
            lambda settings: settings.model_copy(update={"paused": True}),
        )
        self._phase = None

    async def mirror(self, key: str, settings: QueueSettings, number: int) -> None:
        """Give a side the settings of the other, but for those that each has for itself."""

        def edit(result: QueueSettings) -> QueueSettings:
            own = {name: getattr(result, name) for name in _OF_THE_STORE}
            return settings.model_copy(update=own)

        await change_settings(self.members[number].control, key, edit)


_POLL_SECONDS = 0.1
"""seconds between two looks at what a queue waits for"""
_LATER = 1.0
"""seconds between two looks at whether the direction is still the same"""


class StrictOrderGate:
    """Which side of each queue may be received from."""

    def __init__(self, router: MigrationRouter) -> None:
        """Follow ``router``."""
        self._router = router
        self._empty_since: dict[QueuePart, float] = {}

    async def plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return every place that may be received from, the sides that are left first."""
        phase = await self._router.phase()
        results = await gather_all(self._of(key, phase) for key in keys)
        parts = [part for parts in results for part in parts]
        held = any(len(parts) == 1 for parts in results) and phase is not MigrationPhase.IDLE
        return ReceivePlan(
            tuple(sorted(parts, key=lambda part: part.member == phase.towards)),
            _POLL_SECONDS if held else _LATER,
        )

    async def _of(self, key: str, phase: MigrationPhase) -> tuple[QueuePart, ...]:
        towards = phase.towards
        if phase is MigrationPhase.IDLE:
            return (QueuePart(towards, key),)
        part = QueuePart(1 - towards, key)
        try:
            members = await self._router.read(key)
            stats = await self._router.members[part.member].control.stats(key)
        except BackendUnavailable:  # its content is unknown, so what follows waits
            return (part,)
        if await self._passed(part, members, stats):
            return (part, QueuePart(towards, key))
        return (part,)

    async def _passed(self, part: QueuePart, members: Sides, stats: QueueStats) -> bool:
        ledger = stats.ledger
        live = ledger.waiting or ledger.scheduled or ledger.in_flight
        towards = NEW if part.member == OLD else OLD
        if live or members.open_side != towards:
            used = stats.delivered or ledger.published
            if live or used:
                self._empty_since.pop(part, None)
                return False
            # It was never used there and cannot be: the first publish closes it before.
            return True
        limit = members[part.member].rate_limit
        if limit is None or not stats.delivered:
            return True
        now = self._router.members[towards].backend.now()
        return now >= self._empty_since.setdefault(part, now) + limit.period
