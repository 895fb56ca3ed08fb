"""The changes of the clock of several zones, what a calendar asks for around them, and servers that fire it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import schedules_of
from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer.firing import fire_due, fire_schedules
from taskqueue_core.queue import Queue
from taskqueue_core.schedules import Cron, Schedule, TaskTemplate, text_of
from taskqueue_core.schedules.schedule import CatchUp

ZONES = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # by half an hour
    "America/Santiago",  # at midnight
    "Africa/Casablanca",  # by the moon
)
POLICIES: tuple[CatchUp, ...] = ("none", "last", "all")
HOUR = 3600.0
OUTAGE = (-3.0 * HOUR, 3.0 * HOUR + 300)
"""begin and end of the outage, in seconds from the change"""
_LENGTH = (-6 * HOUR, 30 * HOUR)
_YEAR = 2026


class Change(NamedTuple):
    """A change of the clock of a zone."""

    zone: str
    at: float
    before: timedelta
    after: timedelta

    @property
    def walls(self) -> list[tuple[int, int]]:
        """Hour and minute that the clock skips or repeats, in the middle and around."""
        first = datetime.fromtimestamp(self.at, UTC).replace(tzinfo=None)
        first += min(self.before, self.after)
        middle = first + abs(self.after - self.before) / 2
        hours = [first - timedelta(hours=1), middle, first + timedelta(hours=1)]
        return [(each.hour, middle.minute) for each in hours]

    def instants(self, kind: str) -> list[float]:
        """Return the instants of a kind of schedule around the change, by a search through all minutes."""
        start, end = (self.at + length for length in _LENGTH)
        walls = {"star": None, "nightly": self.walls[1:2], "three": self.walls}[kind]
        if walls is None:
            half_hours = [start + n * 1800 for n in range(1, int((end - start) // 1800) + 1)]
            zone = ZoneInfo(self.zone)
            assert all(datetime.fromtimestamp(at, zone).minute % 30 == 0 for at in half_hours)
            return half_hours
        day = datetime.fromtimestamp(self.at, UTC).replace(hour=0, minute=0, tzinfo=None)
        found = {
            self._at(day + timedelta(days=days, hours=hour, minutes=minute))
            for days in range(-2, 4)
            for hour, minute in walls
        }
        return sorted(at for at in found if start < at <= end)

    def _at(self, wall: datetime) -> float:
        """Return the first time at which the clock shows ``wall``; the change, if it skips that."""
        zone = ZoneInfo(self.zone)
        times = [(wall - offset).replace(tzinfo=UTC) for offset in (self.before, self.after)]
        shown = [at for at in times if at.astimezone(zone).replace(tzinfo=None) == wall]
        return min(shown).timestamp() if shown else self.at

    def cron(self, kind: str) -> Cron:
        """Return the expression of a kind of schedule."""
        if kind == "star":
            return Cron("*/30 * * * *", self.zone)
        walls = self.walls[1:2] if kind == "nightly" else self.walls
        hours = ",".join(sorted({str(hour) for hour, _ in walls}))
        return Cron(f"{walls[0][1]} {hours} * * *", self.zone)


def changes(year: int = _YEAR) -> Iterator[Change]:
    """Yield the changes of a year in all zones."""
    for name in ZONES:
        zone, start = ZoneInfo(name), datetime(year, 1, 1, tzinfo=UTC)
        times = [start + timedelta(minutes=30) * n for n in range(365 * 48)]
        offsets = [(at, at.astimezone(zone).utcoffset() or timedelta()) for at in times]
        found = [(at, old, new) for (_, old), (at, new) in pairwise(offsets) if old != new]
        assert len(found) == 2
        yield from (Change(name, at.timestamp(), old, new) for at, old, new in found)


class Night:
    """The schedules around one change on one store, and the servers that fire them, one per backend.

    On a store whose signals follow its clock, a server is the loop of the product. On others, whose signals wait in
    real time, it is one step of this loop at each instant; the steps of all servers run at the same time.
    """

    def __init__(
        self, change: Change, clock: ManualClock, backends: Sequence[Backend], *, loops: bool
    ) -> None:
        self._change = change
        self._clock = clock
        self._backends = backends
        self._by_loops = loops
        self._serving = False
        self._kinds = [(kind, each) for kind in ("star", "nightly", "three") for each in POLICIES]
        self._loops: list[asyncio.Task[Any]] = []

    def _name(self, kind: str, policy: CatchUp) -> str:
        zone = self._change.zone.rpartition("/")[2]
        return f"{zone}.{int(self._change.at)}.{kind}.{policy}"

    async def run(self, *, outage: bool) -> None:
        """Put the schedules, let the time pass, and check that each instant was fired once, or skipped as it should."""
        first, change = self._backends[0], self._change
        await self._clock.advance_to(change.at + _LENGTH[0])
        ends = datetime.fromtimestamp(change.at + _LENGTH[1] + 1, UTC)
        for kind, policy in self._kinds:
            schedule = Schedule(
                self._name(kind, policy),
                change.cron(kind),
                TaskTemplate(key="q"),
                catch_up=policy,
                late=86_400,
                overlap="allow",
                ends=ends,
            )
            await Queue(first).schedules.put(schedule)
        times = {at for kind, _ in self._kinds for at in change.instants(kind)}
        stop, go = (change.at + offset for offset in OUTAGE)
        self._start()
        for at in sorted(times | {go}):
            if outage and stop < at < go:
                await self._stop()
            await self._clock.advance_to(at)
            if outage and at == go:
                self._start()
            if self._serving:
                await self._fired()
            if outage and at == go:
                await self._check_skipped(stop, go)
        await self._stop()
        await self._check((stop, go) if outage else (0.0, 0.0))

    def _start(self) -> None:
        self._serving = True
        if self._by_loops:
            self._loops = [asyncio.create_task(fire_schedules(each)) for each in self._backends]

    async def _stop(self) -> None:
        self._serving = False
        loops, self._loops = self._loops, []
        for loop in loops:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop

    async def _fired(self) -> None:
        """Wait until nothing is due."""
        every = [schedules_of(each) for each in self._backends]
        async with asyncio.timeout(60):
            while (await every[0].due(1)).schedules:
                if self._by_loops:
                    await asyncio.sleep(0)
                else:
                    await asyncio.gather(*(fire_due(each, set(), shared=True) for each in every))

    async def _check(self, outage: tuple[float, float]) -> None:
        backend = self._backends[0]
        published = Counter[str]()
        async with backend.subscribe(["q"], "c") as subscription:
            while (received := await subscription.receive(1000, 0)).deliveries:
                published.update(each.task.id for each in received.deliveries)
                await subscription.ack(*received.deliveries)
        expected = Counter[str]()
        for kind, policy in self._kinds:
            name, all_of = self._name(kind, policy), self._change.instants(kind)
            missed = [at for at in all_of if outage[0] < at < outage[1]]
            kept = missed[len(missed) - _made_up(policy, missed) :]
            fired = [at for at in all_of if at not in missed or at in kept]
            expected.update(f"{name}.{text_of(at)}" for at in fired)
        assert published == expected, (published - expected, expected - published)
        assert set(published.values()) == {1}

    async def _check_skipped(self, stop: float, go: float) -> None:
        """Check that the store has recorded what was skipped."""
        for kind, policy in self._kinds:
            missed = [at for at in self._change.instants(kind) if stop < at < go]
            stored = await schedules_of(self._backends[0]).get(self._name(kind, policy))
            assert stored is not None
            skipped = sum(each.count for each in stored.recent if each.result == "missed")
            assert skipped == len(missed) - _made_up(policy, missed), stored.name


def _made_up(policy: CatchUp, missed: Sequence[float]) -> int:
    """Return how many of the missed instants are fired after all, the newest of them."""
    return {"none": 0, "last": min(1, len(missed)), "all": len(missed)}[policy]
