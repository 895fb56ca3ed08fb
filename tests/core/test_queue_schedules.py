"""`Queue.schedules`: create, change, pause, run and delete the schedules of a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from taskqueue_core import Queue, Schedule, ScheduleStatus, TaskTemplate, connect_sync
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Fire, Fired, QueueSettings, StoredSchedule, schedules_of
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import (
    CapabilityMissing,
    InvalidInput,
    PublishUnconfirmed,
    QueueFull,
    SettingsConflict,
    UnknownKey,
)
from taskqueue_core.schedules import Cron, Every
from taskqueue_core.tasks import Published
from taskqueue_memory import MemoryBackend

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()
MAIL = TaskTemplate.of("mail", {"to": "ada"}, expires_in=600)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that shows noon."""
    return ManualClock(NOON)


@pytest.fixture
async def queue(clock: ManualClock) -> AsyncIterator[Queue]:
    """A queue in memory, at noon."""
    backend = MemoryBackend(clock=clock)
    yield Queue(backend)
    await backend.aclose()


def hourly(**options: Any) -> Schedule:
    """Return a schedule with an instant every hour."""
    return Schedule("digest", Every(3600), MAIL, **options)


async def stored(queue: Queue) -> ScheduleStatus:
    """Return the schedule of the tests."""
    found = await queue.schedules.get("digest")
    assert found is not None
    return found


async def test_a_schedule_is_created_read_and_deleted(queue: Queue) -> None:
    """U13: put, get, list and delete."""
    status = await queue.schedules.put(hourly(jitter=5))
    assert status == await stored(queue)
    assert (status.key, status.next_at, status.paused, status.version) == (
        "mail",
        NOON + 3600,
        False,
        1,
    )
    assert status.schedule == hourly(jitter=5)
    assert (status.declared_by, status.recent, status.problem) == (None, (), None)
    await queue.schedules.put(replace(hourly(), name="a"))
    assert [each.name for each in await queue.schedules.list()] == ["a", "digest"]
    assert [each.name for each in await queue.schedules.list(after="a")] == ["digest"]
    assert [each.name for each in await queue.schedules.list(limit=1)] == ["a"]
    assert await queue.schedules.delete("a")
    assert not await queue.schedules.delete("a")
    assert await queue.schedules.get("a") is None


async def test_a_change_keeps_the_next_instant_unless_the_time_changes(
    queue: Queue, clock: ManualClock
) -> None:
    """U14: putting a schedule again neither repeats nor loses an instant."""
    first = await queue.schedules.put(hourly())
    assert await queue.schedules.put(hourly()) == first  # nothing to write
    changed = await queue.schedules.put(hourly(late=60))
    assert (changed.version, changed.next_at) == (2, NOON + 3600)
    # An instant that is due is not skipped by a change of the payload.
    await clock.advance(4000)
    changed = await queue.schedules.put(replace(hourly(), call=TaskTemplate.of("mail", "new")))
    assert changed.next_at == NOON + 3600
    changed = await queue.schedules.put(Schedule("digest", Every(60), MAIL))
    assert changed.next_at == NOON + 4020


async def test_a_version_detects_a_change_in_between(queue: Queue) -> None:
    """U13: with a version, a put or delete of a schedule that has changed is a conflict."""
    await queue.schedules.put(hourly(), version=0)
    with pytest.raises(SettingsConflict):
        await queue.schedules.put(hourly(late=60), version=0)
    await queue.schedules.put(hourly(late=60), version=1)
    with pytest.raises(SettingsConflict):
        await queue.schedules.put(hourly(late=70), version=1)
    with pytest.raises(SettingsConflict):
        await queue.schedules.delete("digest", version=1)
    found = await stored(queue)
    assert found.schedule == hourly(late=60)
    assert await queue.schedules.delete("digest", version=found.version)


async def test_puts_at_the_same_time_all_end(queue: Queue) -> None:
    """U13: without a version, a put that meets another one is repeated."""
    puts = [queue.schedules.put(hourly(late=60 + n)) for n in range(5)]
    await asyncio.gather(*puts)
    assert (await stored(queue)).version == 5


async def test_a_pause_stays_until_it_is_resumed(queue: Queue, clock: ManualClock) -> None:
    """U13: a paused schedule does not fire, also after a put; after a resume, it goes on with the next instant."""
    await queue.schedules.put(hourly())
    paused = await queue.schedules.pause("digest")
    assert (paused.paused, paused.next_at) == (True, None)
    assert await queue.schedules.pause("digest") == paused
    again = await queue.schedules.put(hourly(late=60))
    assert (again.paused, again.next_at) == (True, None)
    await clock.advance(7300)
    resumed = await queue.schedules.resume("digest")
    assert (resumed.paused, resumed.next_at) == (False, NOON + 3 * 3600)
    # A schedule that is created paused runs once it is resumed, also after it is put again.
    other = await queue.schedules.put(Schedule("other", Every(60), MAIL, paused=True))
    assert (other.paused, other.next_at) == (True, None)
    assert (await queue.schedules.resume("other")).next_at == NOON + 7320
    assert not (await queue.schedules.put(Schedule("other", Every(60), MAIL, paused=True))).paused


async def test_the_next_instants(queue: Queue) -> None:
    """U13: also those of a paused schedule, and no more than there are."""
    ends = datetime(2026, 6, 1, 14, 30, tzinfo=UTC)
    await queue.schedules.put(hourly(ends=ends))
    assert await queue.schedules.next("digest", 2) == (NOON + 3600, NOON + 7200)
    await queue.schedules.pause("digest")
    assert await queue.schedules.next("digest") == (NOON + 3600, NOON + 7200)
    for count in (0, 1001):
        with pytest.raises(InvalidInput, match="count"):
            await queue.schedules.next("digest", count)


async def test_a_trigger_publishes_now(queue: Queue, clock: ManualClock) -> None:
    """U13: run now, once more if the overlap permits it; the outcome is recorded, the next instant stays."""
    await queue.schedules.put(hourly())
    confirmation = await queue.schedules.trigger("digest")
    assert confirmation.status is Published.ACCEPTED
    assert confirmation.task_id == "digest.2026-06-01T12:00:00Z"
    await clock.advance(1.2345)
    again = await queue.schedules.trigger("digest")
    assert (again.status, again.existing_id) == (Published.DUPLICATE, confirmation.task_id)
    third = await queue.schedules.trigger("digest", overlap="allow")
    assert (third.status, third.task_id) == (Published.ACCEPTED, "digest.2026-06-01T12:00:01.234Z")
    found = await stored(queue)
    assert found.next_at == NOON + 3600
    assert [each.result for each in found.recent] == ["accepted", "overlap", "accepted"]
    await queue.backend.control.configure("mail", QueueSettings(capacity=1))  # type: ignore[attr-defined] # memory
    await clock.advance(1)
    with pytest.raises(QueueFull):
        await queue.schedules.trigger("digest", overlap="allow")


async def test_a_backfill_publishes_each_instant_once(queue: Queue) -> None:
    """U13: the instants of a time that has passed; those that were published before are duplicates."""
    await queue.schedules.put(hourly())
    since, until = NOON - 4 * 3600, NOON - 3600
    first = await queue.schedules.backfill("digest", since, until)
    assert [each.task_id[7:] for each in first] == [
        f"2026-06-01T{hour:02}:00:00Z" for hour in (8, 9, 10)
    ]
    assert {each.status for each in first} == {Published.ACCEPTED}
    moments = [datetime.fromtimestamp(at, UTC) for at in (since, NOON)]
    second = await queue.schedules.backfill("digest", *moments)
    assert [each.status.value for each in second] == ["duplicate"] * 3 + ["accepted"]
    (status,) = [await queue.status("mail", first[0].task_id)]
    assert status is not None
    assert status.state == "waiting"  # its time to expire counts from now
    assert len(await queue.schedules.backfill("digest", NOON - 1, NOON)) == 0
    wrong: list[tuple[tuple[Any, float], str]] = [
        ((NOON - 60, NOON + 60), "until"),
        ((NOON, NOON), "since"),
        ((NOON - 1001 * 3600, NOON), "until"),
        ((-5.0, NOON), "since"),
        ((moments[0].replace(tzinfo=None), NOON), "since"),
    ]
    for at, field in wrong:
        with pytest.raises(InvalidInput) as caught:
            await queue.schedules.backfill("digest", *at)
        assert caught.value.field == field


async def test_a_full_queue_ends_a_backfill(queue: Queue) -> None:
    """U13: the first refused task is the last one; what was accepted stays."""
    await queue.schedules.put(hourly())
    await queue.backend.control.configure("mail", QueueSettings(capacity=2))  # type: ignore[attr-defined] # memory
    found = await queue.schedules.backfill("digest", NOON - 5 * 3600, NOON)
    assert [each.status.value for each in found] == ["accepted", "accepted", "refused"]


async def test_what_does_not_exist_or_is_no_schedule_is_named(queue: Queue) -> None:
    """U13: an unknown name, another queue, and a wrong argument."""
    for call in (
        queue.schedules.pause("missing"),
        queue.schedules.resume("missing"),
        queue.schedules.next("missing"),
        queue.schedules.trigger("missing"),
        queue.schedules.backfill("missing", NOON - 60, NOON),
    ):
        with pytest.raises(UnknownKey, match="name: got a schedule that does not exist"):
            await call
    wrong: Any = {"name": "digest"}
    with pytest.raises(InvalidInput, match="schedule"):
        await queue.schedules.put(wrong)
    with pytest.raises(InvalidInput, match="declared_by"):
        await queue.schedules.put(hourly(), declared_by="x" * 201)
    await queue.schedules.put(hourly())
    with pytest.raises(InvalidInput, match="key: got another queue"):
        await queue.schedules.put(replace(hourly(), call=TaskTemplate.of("other")))
    unknown: Any
    for unknown in ("no", ["skip"]):
        with pytest.raises(InvalidInput, match="overlap"):
            await queue.schedules.trigger("digest", overlap=unknown)


async def test_a_damaged_schedule_is_shown_and_can_be_replaced(queue: Queue) -> None:
    """U13: a specification that this version cannot read hides no other schedule."""
    await queue.schedules.put(replace(hourly(), name="fine"))
    damaged = StoredSchedule(key="mail", name="digest", spec=b'{"v":2}')
    await schedules_of(queue.backend).put(damaged)
    broken, fine = await queue.schedules.list()
    assert (broken.schedule, broken.problem is None) == (None, False)
    assert fine.problem is None
    with pytest.raises(InvalidInput, match="schedule"):
        await queue.schedules.pause("digest")
    assert (await queue.schedules.put(hourly())).problem is None


class Without(MemoryBackend):
    """A backend that keeps no schedules."""

    capabilities = replace(
        MemoryBackend.capabilities,
        names=MemoryBackend.capabilities.names - {Capability.SCHEDULES},
    )


async def test_a_backend_without_schedules_says_so() -> None:
    """U13: the capability is named, before anything is stored."""
    queue = Queue(Without())
    for call in (queue.schedules.put(hourly()), queue.schedules.list(), queue.schedules.get("x")):
        with pytest.raises(CapabilityMissing, match="'schedules'"):
            await call


async def test_a_lost_answer_of_a_trigger_is_repeated(queue: Queue) -> None:
    """U14: the same task is published again, so there is one."""
    backend: Any = queue.backend
    await queue.schedules.put(hourly())
    fire = backend.schedules.fire
    lost: list[tuple[Fired, ...]] = []

    async def unreliable(*fires: Fire) -> tuple[Fired, ...]:
        done: tuple[Fired, ...] = await fire(*fires)
        if not lost:
            lost.append(done)
            raise PublishUnconfirmed("the answer was lost")
        return done

    backend.schedules.fire = unreliable
    confirmation = await queue.schedules.trigger("digest")
    assert (confirmation.status, len(lost)) == (Published.DUPLICATE, 1)
    assert (await queue.ledger("mail")).published == 1


def test_schedules_without_an_event_loop() -> None:
    """U13: `SyncQueue.schedules` has the same methods."""
    with connect_sync("taskqueue_memory") as queue:
        schedules = queue.schedules
        schedules.put(Schedule("digest", Cron("@daily"), MAIL))
        assert schedules.get("digest") == schedules.list()[0]
        assert schedules.pause("digest").paused
        assert not schedules.resume("digest").paused
        assert len(schedules.next("digest", 3)) == 3
        assert schedules.trigger("digest").stored
        since, until = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC)
        assert len(schedules.backfill("digest", since, until)) == 2
        assert schedules.delete("digest")
