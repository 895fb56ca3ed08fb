"""Which side of a migration takes a queue's new tasks in, as the settings in both stores say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from typing import NamedTuple, TypeVar

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.composite.backend import Place, Plan, Side
from taskqueue_core.concurrency import together
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.tasks import QueueStats

__all__ = [
    "MARKER",
    "NEW",
    "OLD",
    "Crossing",
    "Gates",
    "MigrationMode",
    "Phase",
    "Sides",
    "ours",
]

T = TypeVar("T")

OLD, NEW = 0, 1
MARKER = "_taskqueue.migration"
"""the queue whose settings stand for those of all queues that do not exist yet"""
_WORD = "backend:"
_REMEMBERED = 1.0
"""seconds for which a phase is taken for granted: nothing depends on it being the latest"""
_OF_THE_STORE = ("version", "moved_to", "durability", "replicas", "journal", "shards")
"""settings that each side has for itself"""


class MigrationMode(StrEnum):
    """What comes first while both sides have tasks."""

    AVAILABLE = "available"
    """the new side flows, whatever becomes of the old one"""
    STRICT = "strict"
    """order and limits hold: a queue's new side waits until its old one is empty"""


class Phase(StrEnum):
    """How far a migration is."""

    IDLE = "idle"
    """nothing was begun: the old side has everything"""
    STARTED = "started"
    """the new side takes in, the old one runs empty"""
    FINISHED = "finished"
    """the old side was found empty, and is closed"""
    ROLLED_BACK = "rolled_back"
    """the old side takes in, the new one runs empty"""
    TURNING = "turning"
    """a start or a rollback was interrupted: give the command again"""

    @property
    def towards(self) -> int:
        """Return the side that takes in what is new."""
        return NEW if self in (Phase.STARTED, Phase.FINISHED) else OLD


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


class Crossing:
    """Reads and turns the settings that say where new tasks go. What it remembers may be out of date, and does no harm.

    A side that is open in vain refuses, and who then asks `forget`s and reads again.
    """

    def __init__(self, sides: tuple[Side, Side], mode: MigrationMode, patience: float) -> None:
        """Wait so many seconds for a side that can be done without."""
        self.sides = sides
        self.mode = mode
        self.patience = patience
        self.copied_to: dict[str, tuple[str, ...]] = {}
        """where the tasks of queues go as copies, as far as this process has read"""
        self._open: dict[str, int] = {}
        self._phase: tuple[float, Phase] | None = None

    def word(self, number: int) -> str:
        """Return what a queue that is closed on the other side says of where it went."""
        return _WORD + self.sides[number].name

    async def ask(self, number: int, call: Callable[[], Awaitable[T]]) -> T:
        """Ask a side; one that can be done without has its time. Raises `BackendUnavailable`."""
        if self.mode is MigrationMode.STRICT or number != self.left:
            return await call()
        return await self.sides[number].within(self.patience, call)

    @property
    def left(self) -> int:
        """The side that is left behind, as far as is known."""
        return OLD if self._phase is None else 1 - self._phase[1].towards

    # reading

    async def read(self, key: str) -> Sides:
        """Return the settings of a queue on both sides."""
        found = await together(
            self.ask(number, partial(side.control.settings, key))
            for number, side in enumerate(self.sides)
        )
        return Sides(*found)

    async def phase(self, *, fresh: bool = False) -> Phase:
        """Return how far the migration is. The new side alone can tell that it was started."""
        now = asyncio.get_running_loop().time()
        if self._phase is None or fresh or now >= self._phase[0] + _REMEMBERED:
            self._phase = now, await self._read_phase()
        return self._phase[1]

    async def _read_phase(self) -> Phase:
        try:
            new = await self.sides[NEW].control.settings(MARKER)
        except BackendUnavailable:
            if self.mode is MigrationMode.STRICT or ours(await self._marker(OLD)):
                raise
            # or never begun: the old side is open, and that is all that counts now
            return Phase.ROLLED_BACK
        if not new.version:
            return Phase.IDLE
        if not ours(new):
            return Phase.FINISHED if new.paused else Phase.STARTED
        return Phase.TURNING if ours(await self._marker(OLD)) else Phase.ROLLED_BACK

    async def _marker(self, number: int) -> QueueSettings:
        return await self.sides[number].control.settings(MARKER)

    async def authority(self, key: str) -> tuple[int, QueueSettings]:
        """Return the side whose settings of a queue are in force, and these."""
        phase = await self.phase()
        try:
            found = await self.read(key)
        except BackendUnavailable:
            alive = await self._without(key, phase.towards)
            return alive, await self.sides[alive].control.settings(key)
        number = found.open_side
        number = phase.towards if number is None else number
        return number, found[number]

    async def open_side(self, key: str) -> int | None:
        """Return the side that takes a queue's new tasks in; ``None`` while it is on its way from one to the other.

        A queue that has never been used is closed on the side that is left before it is open on the other.
        """
        if key in self._open:
            return self._open[key]
        phase = await self.phase()
        try:
            found = await self.read(key)
        except BackendUnavailable:
            return await self._without(key, phase.towards)
        number = found.open_side
        if number is None and not found.both_closed:
            number = phase.towards
            if phase is not Phase.IDLE:
                await self.close(key, 1 - number)
        if number is not None:
            self._open[key] = number
            self.copied_to[key] = found[number].bound_to
        return number

    async def _without(self, key: str, number: int) -> int:
        """Return the side that takes in where the other is out of reach, if its own settings say that it does."""
        if self.mode is MigrationMode.AVAILABLE:
            found = await self.sides[number].control.settings(key)
            if not ours(found):
                return number  # and not remembered: the other one may come back
        raise BackendUnavailable("one side of the migration is out of reach")

    def forget(self, key: str) -> None:
        """Read a queue's settings anew before they are needed again."""
        self._open.pop(key, None)

    # turning

    async def close(self, key: str, number: int) -> None:
        """Close a queue on a side to new ids. It still answers for those that it knows."""
        word = self.word(1 - number)
        await change_settings(
            self.sides[number].control,
            key,
            lambda found: found if ours(found) else found.model_copy(update={"moved_to": word}),
        )

    async def reopen(self, key: str, number: int) -> None:
        """Open a queue on a side; the other must be closed."""
        await change_settings(
            self.sides[number].control,
            key,
            lambda found: found.model_copy(update={"moved_to": None}) if ours(found) else found,
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
            self.sides[number].control,
            MARKER,
            lambda found: found.model_copy(update={"moved_to": None, "paused": False}),
        )
        new = await self.sides[NEW].control.settings(MARKER)
        # a first change, so that it says that there was a start
        if number == NEW and not new.version:
            await self.sides[NEW].control.configure(MARKER, new)
        self._phase = None
        self._open.clear()

    async def seal(self) -> None:
        """Note that the side that was left has been found empty."""
        await change_settings(
            self.sides[NEW].control,
            MARKER,
            lambda found: found.model_copy(update={"paused": True}),
        )
        self._phase = None

    async def mirror(self, key: str, settings: QueueSettings, number: int) -> None:
        """Give a side the settings of the other, but for those that each has for itself."""

        def edit(found: QueueSettings) -> QueueSettings:
            own = {name: getattr(found, name) for name in _OF_THE_STORE}
            return settings.model_copy(update=own)

        await change_settings(self.sides[number].control, key, edit)


_SOON = 0.1
"""seconds between two looks at what a queue waits for"""
_LATER = 1.0
"""seconds between two looks at whether the direction is still the same"""


class Gates:
    """Which side of each queue may be received from."""

    def __init__(self, crossing: Crossing) -> None:
        """Follow ``crossing``."""
        self._crossing = crossing
        self._empty_since: dict[Place, float] = {}

    async def plan(self, keys: tuple[str, ...]) -> Plan:
        """Return every place that may be received from, the sides that are left first."""
        phase = await self._crossing.phase()
        told = await together(self._of(key, phase) for key in keys)
        places = [place for some in told for place in some]
        held = any(len(some) == 1 for some in told) and phase is not Phase.IDLE
        return Plan(
            tuple(sorted(places, key=lambda place: place.side == phase.towards)),
            _SOON if held else _LATER,
        )

    async def _of(self, key: str, phase: Phase) -> tuple[Place, ...]:
        towards = phase.towards
        if phase is Phase.IDLE:
            return (Place(towards, key),)
        left = Place(1 - towards, key)
        try:
            found = await self._crossing.read(key)
            stats = await self._crossing.sides[left.side].control.stats(key)
        except BackendUnavailable:  # who knows what it has: what is to come waits
            return (left,)
        if await self._passed(left, found, stats):
            return (left, Place(towards, key))
        return (left,)

    async def _passed(self, left: Place, found: Sides, stats: QueueStats) -> bool:
        ledger = stats.ledger
        live = ledger.waiting or ledger.scheduled or ledger.in_flight
        towards = NEW if left.side == OLD else OLD
        if live or found.open_side != towards:
            used = stats.delivered or ledger.published
            if live or used:
                self._empty_since.pop(left, None)
                return False
            # Nobody has ever used it there, and nobody can: the first to publish closes it before.
            return True
        limit = found[left.side].rate_limit
        if limit is None or not stats.delivered:
            return True
        now = self._crossing.sides[towards].backend.now()
        return now >= self._empty_since.setdefault(left, now) + limit.period
