"""Schedules: they are kept as they were put, by queue and name, with versions."""

from __future__ import annotations

from typing import Any

import pytest

from taskqueue_conformance.bench import KEY, OTHER, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.schedule_fires import NAME, fire, near, plan, put
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import (
    Fired,
    Run,
    StoredSchedule,
    schedules_of,
)
from taskqueue_core.errors import (
    InvalidInput,
    SettingsConflict,
)


class SchedulesKeptSuite(Harness, needs=(Capability.SCHEDULES,)):
    """Tests of the methods of `taskqueue_core.capabilities.Schedules` that keep schedules."""

    async def test_put_a_schedule(self, bench: Bench) -> None:
        """A schedule is returned as it was put, with a version; an unknown one is ``None``."""
        assert await schedules_of(bench.backend).get(NAME) is None
        spec = '{"text": "grüße \\u2028 \U0001f600", "n": [0, -1.5, 1e300]}'.encode()
        at = round(bench.now) + 3600.000001
        stored = await put(bench, spec=spec, next_at=at)
        assert stored == StoredSchedule(
            key=KEY, name=NAME, spec=spec, next_at=at, version=stored.version
        )
        assert stored.version > 0
        assert await schedules_of(bench.backend).get(NAME) == stored
        assert await schedules_of(bench.backend).get(NAME, key=KEY) == stored
        assert await schedules_of(bench.backend).get(NAME, key=OTHER) is None

    async def test_versions_of_schedules(self, bench: Bench) -> None:
        """A put that names a version replaces only that version, and 0 means that there is none yet."""
        first = await put(bench, version=0, spec=b"1")
        for wrong in (0, first.version + 5):
            with pytest.raises(SettingsConflict):
                await put(bench, version=wrong, spec=b"2")
        assert await schedules_of(bench.backend).get(NAME) == first
        second = await put(bench, version=first.version, spec=b"2")
        assert second.version > first.version
        third = await put(bench, spec=b"3")
        assert third.version > second.version

    async def test_repeated_put(self, bench: Bench) -> None:
        """A put that is repeated because its answer was lost returns the stored schedule."""
        first = await put(bench, version=0)
        assert await put(bench, version=0) == first

    async def test_versions_are_not_used_again(self, bench: Bench) -> None:
        """A schedule that is deleted and put again has a new version, so that an old plan does not fit it."""
        stored = await put(bench)
        assert await schedules_of(bench.backend).delete(KEY, NAME)
        again = await put(bench)
        assert again.version > stored.version
        assert await fire(bench, stored) == Fired(stale=True)
        await bench.expect()

    async def test_delete_a_schedule(self, bench: Bench) -> None:
        """A deleted schedule neither fires nor is listed, and the tasks that it published stay."""
        stored = await put(bench)
        await fire(bench, stored, next_at=bench.now)
        with pytest.raises(SettingsConflict):
            await schedules_of(bench.backend).delete(KEY, NAME, version=stored.version + 1)
        assert await schedules_of(bench.backend).delete(KEY, NAME, version=stored.version)
        assert not await schedules_of(bench.backend).delete(KEY, NAME)
        assert await schedules_of(bench.backend).get(NAME) is None
        assert await schedules_of(bench.backend).list() == ()
        due = await schedules_of(bench.backend).due(9)
        assert (due.schedules, due.next_at) == ((), None)
        await bench.expect(waiting=1)

    async def test_list_of_schedules(self, bench: Bench) -> None:
        """Schedules of all queues are listed page by page, sorted by name."""
        names = [f"s{number:02}" for number in range(25)]
        for number, name in enumerate(reversed(names)):
            await put(bench, name=name, key=f"queue{number % 3}", next_at=None)
        listed: list[str] = []
        while page := await schedules_of(bench.backend).list(
            after=listed[-1] if listed else None, limit=7
        ):
            assert len(page) == min(7, len(names) - len(listed))
            listed += [schedule.name for schedule in page]
        assert listed == names
        await bench.invalid("limit", schedules_of(bench.backend).list(limit=0))

    async def test_a_change_keeps_the_next_time(self, bench: Bench) -> None:
        """With ``keep_next``, a schedule that was fired since it was read is not fired again for the same instant."""
        stored = await put(bench)
        await fire(bench, stored, next_at=bench.now + 60)
        kept = await put(bench, spec=b'"changed"', next_at=stored.next_at, keep_next=True)
        assert near(kept.next_at, bench.now + 60)
        assert [one.result for one in kept.recent] == ["accepted"]
        assert (await schedules_of(bench.backend).due(9)).schedules == ()
        new = await put(bench, name="new", keep_next=True)
        assert (await schedules_of(bench.backend).due(9)).schedules == (new,)

    async def test_bad_schedules(self, bench: Bench) -> None:
        """What cannot be stored is refused with the name of the field."""
        cases: tuple[tuple[str, Any], ...] = (
            ("key", ""), ("name", "no spaces"), ("spec", b"{"), ("next_at", float("nan")),
        )  # fmt: skip
        for field, value in cases:
            with pytest.raises(InvalidInput) as error:
                await put(bench, **{field: value})
            assert error.value.field == field
        stored = await put(bench)
        with pytest.raises(InvalidInput):
            plan(stored, runs=(Run(1.0, bench.task("t1", key=OTHER)),))

    async def test_signal_of_schedules(self, bench: Bench) -> None:
        """A schedule that is put and fires before all others sets the signal."""
        await put(bench, next_at=bench.now + 3600)
        early = put(bench, name="early", next_at=bench.now + 1800)
        await bench.fires(schedules_of(bench.backend).signal(), early)

    @needs("shared")
    async def test_signal_of_another_process(self, bench: Bench) -> None:
        """A schedule that another process puts sets the signal."""
        other = await bench.replica()
        await bench.fires(schedules_of(other.backend).signal(), put(bench))

    @needs("durable")
    async def test_survives_the_process(self, bench: Bench) -> None:
        """Schedules survive the end of the process."""
        stored = await put(bench)
        other = await bench.reopen()
        assert await schedules_of(other.backend).get(NAME) == stored
        assert (await schedules_of(other.backend).due(9)).schedules == (stored,)
