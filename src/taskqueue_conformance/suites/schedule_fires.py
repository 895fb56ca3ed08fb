"""Schedules: each instant is fired once, by one step that publishes its task and sets the next time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import (
    Fire,
    Fired,
    Outcome,
    Run,
    Skip,
    StoredSchedule,
    schedules_of,
)
from taskqueue_core.capabilities.schedules import RECENT, RETRY_SECONDS
from taskqueue_core.errors import (
    BackendUnavailable,
    PublishUnconfirmed,
    TooLarge,
)
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Published, Refusal, Task
from taskqueue_core.uniqueness import UniqueKey

NAME = "nightly"
_STATUSES = [Published.ACCEPTED, Published.DUPLICATE, Published.CONFLICT]


class ScheduleFiresSuite(Harness, needs=(Capability.SCHEDULES,)):
    """Tests of the capability ``schedules`` (`taskqueue_core.capabilities.Schedules`)."""

    async def test_due_schedules(self, bench: Bench) -> None:
        """Schedules are due at their time, the earliest first, until they are fired; the next time is known."""
        now = bench.now
        await put(bench, name="second", next_at=now + bench.short * 2)
        await put(bench, name="first", next_at=now + bench.short)
        await put(bench, name="later", next_at=now + 3600)
        await put(bench, name="never", next_at=None)
        due = await schedules_of(bench.backend).due(9)
        assert (due.schedules, near(due.next_at, now + bench.short)) == ((), True)
        assert abs(due.now - bench.now) < 1.0
        await bench.advance(bench.short * 2)
        for _ in range(2):
            due = await schedules_of(bench.backend).due(9)
            assert [schedule.name for schedule in due.schedules] == ["first", "second"]
            assert near(due.next_at, now + 3600)
        due = await schedules_of(bench.backend).due(1)
        assert [schedule.name for schedule in due.schedules] == ["first"]
        assert near(due.next_at, now + bench.short * 2)
        await bench.invalid("limit", schedules_of(bench.backend).due(0))

    async def test_fire_a_schedule(self, bench: Bench) -> None:
        """One step publishes the tasks of a plan and sets the next time, and records what became of each instant."""
        stored = await put(bench)
        at = stored.next_at or 0.0
        skips = (Skip(at - 20, "late", count=5),)
        done = await fire(bench, stored, "t1", "t2", skipped=skips, next_at=at + 3600)
        assert [answer.status for answer in done.confirmations] == [Published.ACCEPTED] * 2
        assert not done.stale
        after = await schedules_of(bench.backend).get(NAME)
        assert after is not None
        assert (after.version, near(after.next_at, at + 3600)) == (stored.version, True)
        assert [(one.result, one.count, one.task_id) for one in after.recent] == [
            ("late", 5, None), ("accepted", 1, "t1"), ("accepted", 1, "t2"),
        ]  # fmt: skip
        instants = [one.instant for one in after.recent]
        assert all(map(near, instants, (at - 20, at, at + 1)))
        assert all(abs(one.at - bench.now) < 1 for one in after.recent)
        assert (await schedules_of(bench.backend).due(9)).schedules == ()
        assert ids(await bench.take(bench.subscribe(), 3)) == ["t1", "t2"]

    async def test_fired_once(self, bench: Bench) -> None:
        """Of several steps for the same instant, the first takes effect, and the others change nothing."""
        stored = await put(bench)
        plans = [plan(stored, f"t{n}", next_at=bench.now + 60) for n in range(5)]
        done = await asyncio.gather(*(schedules_of(bench.backend).fire(each) for each in plans))
        assert sorted(fired.stale for (fired,) in done) == [False, True, True, True, True]
        await bench.expect(waiting=1)
        again = await schedules_of(bench.backend).fire(*plans)
        assert again == (Fired(stale=True),) * 5
        await bench.expect(waiting=1)

    async def test_plan_of_an_old_version(self, bench: Bench) -> None:
        """A step that was planned before the schedule was replaced changes nothing, even at the same instant."""
        stored = await put(bench, spec=b"1")
        changed = await put(bench, spec=b"2", next_at=stored.next_at)
        assert await fire(bench, stored) == Fired(stale=True)
        assert await schedules_of(bench.backend).get(NAME) == changed
        await bench.expect()

    async def test_known_tasks_of_a_schedule(self, bench: Bench) -> None:
        """A task that is known already, or whose id another task has, is not stored again; its instant is over."""
        await bench.publish("t1", "t2")
        stored = await put(bench)
        tasks = bench.task("t0"), bench.task("t1"), bench.task("t2", payload="other")
        runs = tuple(Run((stored.next_at or 0) + n, task) for n, task in enumerate(tasks))
        (done,) = await schedules_of(bench.backend).fire(plan(stored, runs=runs))
        assert [answer.status for answer in done.confirmations] == _STATUSES
        after = await schedules_of(bench.backend).get(NAME)
        assert after is not None
        assert [one.result for one in after.recent] == _STATUSES
        assert after.next_at is None
        await bench.expect(waiting=3)
        done = await fire(bench, await put(bench, key=OTHER, name="other"), "t1", "t1")
        assert [answer.status for answer in done.confirmations] == _STATUSES[:2], "of one step"

    @needs(Capability.UNIQUE)
    async def test_overlap(self, bench: Bench) -> None:
        """An instant whose task has the unique key of a live task is over, and the next one after its end is fired."""
        unique = UniqueKey(key="one-at-a-time")
        subscription = bench.subscribe()
        stored = await put(bench)
        for number in range(3):
            task = bench.task(f"t{number}", unique=unique)
            run = (Run((stored.next_at or 0) + number, task),)
            fire = plan(stored, runs=run, next_at=stored.next_at)
            await schedules_of(bench.backend).fire(fire)
            if number == 1:
                await subscription.ack(await bench.one(subscription))
        after = await schedules_of(bench.backend).get(NAME)
        results = [] if after is None else [one.result for one in after.recent]
        assert results == ["accepted", "overlap", "accepted"]
        await bench.expect(done=1, waiting=1)

    @needs(Capability.FLOW, Capability.CONTROL)
    async def test_full_queue(self, bench: Bench) -> None:
        """If the queue refuses the first task, only that is kept, and the schedule is due in a second (law 6)."""
        await bench.limit(capacity=1)
        await bench.publish("t0")
        stored = await put(bench)
        done = await fire(bench, stored, skipped=(Skip(1.0, "late"),), next_at=bench.now + 60)
        assert [answer.code for answer in done.confirmations] == [Refusal.QUEUE_FULL]
        after = await schedules_of(bench.backend).get(NAME)
        assert after == structs.replace(stored, refused=None if after is None else after.refused)
        due = await schedules_of(bench.backend).due(9)
        assert due.schedules == (), "a refused schedule must not hide others"
        assert bench.now < (due.next_at or 0.0) <= bench.now + RETRY_SECONDS
        await bench.limit(capacity=2)
        await bench.advance(RETRY_SECONDS)
        assert (await schedules_of(bench.backend).due(9)).schedules == (after,)
        done = await fire(bench, stored, next_at=bench.now + 60)
        assert [answer.status for answer in done.confirmations] == [Published.ACCEPTED]
        await bench.expect(waiting=2)
        later = await put(bench, name="later", next_at=bench.now + 30)
        await fire(bench, later, "t2")
        due = await schedules_of(bench.backend).due(9)
        assert near(due.next_at, later.next_at or 0.0), (
            "a refusal must not make a schedule due early"
        )

    @needs(Capability.FLOW, Capability.CONTROL)
    async def test_last_refusal(self, bench: Bench) -> None:
        """The last attempt that was refused is kept until the next time changes; one by hand does not count (law 6)."""
        schedules = schedules_of(bench.backend)
        await bench.limit(capacity=1)
        await bench.publish("t0")
        stored = await put(bench)
        at = stored.next_at or 0.0
        await fire(bench, stored)
        assert (await refusal(bench)).result == Refusal.QUEUE_FULL
        await bench.limit(intake_paused=True)
        await schedules.fire(plan(stored, runs=(Run(at + 1, bench.task("t2")),)))
        kept = await refusal(bench)
        assert (kept.result, kept.task_id, kept.count) == (Refusal.INTAKE_PAUSED, "t2", 1)
        assert near(kept.instant, at + 1)
        assert abs(kept.at - bench.now) < 1
        by_hand = plan(stored, "by-hand", planned_for=None)
        await schedules.fire(by_hand)
        assert await refusal(bench) == kept
        changed = await put(bench, spec=b"2", keep_next=True)
        assert changed.refused == kept
        assert changed == await schedules.get(NAME)
        await fire(bench, changed, runs=(), skipped=(Skip(at, "queue_full"),), next_at=at + 60)
        moved = await schedules.get(NAME)
        assert moved is not None
        assert moved.refused is None
        await schedules.fire(plan(moved, "t9", next_at=at + 120))
        assert (await refusal(bench)).task_id == "t9"
        assert (await put(bench)).refused is None
        await bench.expect(waiting=1)

    @needs(Capability.FLOW, Capability.CONTROL)
    async def test_queue_becomes_full(self, bench: Bench) -> None:
        """If the queue refuses a later task of a plan, the schedule continues with its instant (law 6)."""
        await bench.limit(capacity=2)
        stored = await put(bench)
        at = stored.next_at or 0.0
        done = await fire(bench, stored, "t1", "t2", "t3", "t4", next_at=bench.now + 60)
        assert [answer.status for answer in done.confirmations] == [
            Published.ACCEPTED, Published.ACCEPTED, Published.REFUSED,
        ]  # fmt: skip
        after = await schedules_of(bench.backend).get(NAME)
        assert after is not None
        assert near(after.next_at, at + 2)
        assert [one.task_id for one in after.recent] == ["t1", "t2"]
        assert (await refusal(bench)).task_id == "t3"
        await bench.expect(waiting=2)

    async def test_plan_without_effect(self, bench: Bench) -> None:
        """A plan that neither publishes nor moves on lets the schedule be due again a second later."""
        stored = await put(bench)
        await schedules_of(bench.backend).fire(plan(stored, next_at=stored.next_at))
        assert await schedules_of(bench.backend).get(NAME) == stored
        assert (await schedules_of(bench.backend).due(9)).schedules == ()
        await bench.advance(RETRY_SECONDS)
        assert (await schedules_of(bench.backend).due(9)).schedules == (stored,)

    async def test_without_an_instant(self, bench: Bench) -> None:
        """A plan without ``planned_for`` publishes its tasks, and leaves the next time as it is."""
        for at in (bench.now + 60, None):
            stored = await put(bench, next_at=at)
            run = Run(bench.now, bench.task(f"by-hand-{at is None}"))
            await schedules_of(bench.backend).fire(
                plan(stored, runs=(run,), planned_for=None, next_at=1.0)
            )
            after = await schedules_of(bench.backend).get(NAME)
            assert after is not None
            assert after.next_at == stored.next_at
            assert after.recent[-1].task_id == run.task.id
        await bench.expect(waiting=2)

    async def test_several_at_once(self, bench: Bench) -> None:
        """One call fires schedules of several queues; each answer belongs to its plan."""
        stored = [await put(bench, name=f"s{n}", key=(KEY, OTHER)[n % 2]) for n in range(20)]
        plans = [plan(one, f"{one.name}.1") for one in stored]
        plans[3] = plan(stored[3], f"{stored[3].name}.1", version=10**6)
        done = await schedules_of(bench.backend).fire(*plans)
        assert [fired.stale for fired in done] == [n == 3 for n in range(20)]
        assert [a.task_id for fired in done for a in fired.confirmations] == [
            f"s{n}.1" for n in range(20) if n != 3
        ]
        assert len(await bench.take(bench.subscribe(KEY, OTHER), 30)) == 19
        assert await schedules_of(bench.backend).fire() == ()

    async def test_recent_outcomes_are_limited(self, bench: Bench) -> None:
        """Only the last outcomes of a schedule are kept, however many instants were skipped or fired."""
        stored = await put(bench)
        skips = tuple(Skip(float(n), "late") for n in range(5 * RECENT))
        await schedules_of(bench.backend).fire(plan(stored, skipped=skips, next_at=stored.next_at))
        for number in range(3):
            await fire(bench, stored, f"t{number}", next_at=stored.next_at)
        after = await schedules_of(bench.backend).get(NAME)
        assert after is not None
        assert [one.instant for one in after.recent[:-3]] == [
            float(n) for n in range(4 * RECENT + 3, 5 * RECENT)
        ]
        assert [one.task_id for one in after.recent[-3:]] == ["t0", "t1", "t2"]

    async def test_largest_schedules(self, bench: Bench) -> None:
        """The largest specification is stored, listed and due, also several of them; a larger one is refused."""
        spec = b'"' + b"x" * (LIMITS.payload - 2) + b'"'
        names = [f"large{n:02}" for n in range(40)]
        for name in names:
            await put(bench, name=name, spec=spec)
        listed: list[str] = []
        while page := await schedules_of(bench.backend).list(after=listed[-1] if listed else None):
            listed += [schedule.name for schedule in page]
            assert all(schedule.spec == spec for schedule in page)
        assert listed == names
        fired: list[str] = []
        while due := (await schedules_of(bench.backend).due(100)).schedules:
            plans = [plan(one, f"{one.name}.1", payload="y" * (LIMITS.payload - 2)) for one in due]
            assert not any(done.stale for done in await schedules_of(bench.backend).fire(*plans))
            fired += [one.name for one in due]
        assert sorted(fired) == names
        await bench.expect(waiting=40)
        with pytest.raises(TooLarge):
            await put(bench, spec=b" " + spec)

    @needs("failing")
    async def test_step_that_fails_changes_nothing(self, bench: Bench) -> None:
        """A step that fails at any write neither publishes a task nor moves the schedule on, and can be repeated."""
        stored = await put(bench)
        for writes in range(60):
            with bench.harness.failing(bench.backend, writes):
                try:
                    await fire(bench, stored, "t1", "t2", next_at=bench.now + 60)
                except BackendUnavailable:
                    pass
                else:
                    break
            assert await schedules_of(bench.backend).get(NAME) == stored
            await bench.expect()
        assert writes > 1, "the step made no write: `failing` must make the store fail"
        await bench.expect(waiting=2)

    @needs("unanswered")
    async def test_step_without_an_answer(self, bench: Bench) -> None:
        """If the answer of a step is lost, the step is not said to have failed; repeating it changes nothing."""
        stored = await put(bench)
        unsure = False
        with bench.harness.unanswered(bench.backend):
            try:
                await fire(bench, stored)
            except PublishUnconfirmed:
                unsure = True
            except BackendUnavailable:  # the step did not reach the store
                pass
        again = await fire(bench, stored)
        assert again.stale or not unsure
        await bench.expect(waiting=1)

    @needs("shared")
    async def test_two_processes_fire(self, bench: Bench) -> None:
        """Two processes that fire the same schedules at the same time fire each instant once."""
        other = await bench.replica()
        stored = [await put(bench, name=f"s{n}") for n in range(10)]
        plans = [plan(one, f"{one.name}.1") for one in stored]
        one, two = await asyncio.gather(
            schedules_of(bench.backend).fire(*plans),
            schedules_of(other.backend).fire(*reversed(plans)),
        )
        assert [fired.stale for fired in one] == [not fired.stale for fired in reversed(two)]
        await bench.expect(waiting=10)


async def put(
    bench: Bench, *, version: int | None = None, keep_next: bool = False, **fields: Any
) -> StoredSchedule:
    """Put a schedule, which is due unless ``fields`` say otherwise."""
    present: dict[str, Any] = {"key": KEY, "name": NAME, "spec": b"{}", "next_at": bench.now - 1.0}
    schedule = StoredSchedule(**present | fields)
    return await schedules_of(bench.backend).put(schedule, version=version, keep_next=keep_next)


def plan(stored: StoredSchedule, *task_ids: str, payload: str = "", **fields: Any) -> Fire:
    """Return a plan that publishes one task per id, for instants that are a second apart."""
    at = stored.next_at or 0.0
    fields.setdefault("planned_for", stored.next_at)
    fields.setdefault("version", stored.version)
    fields.setdefault(
        "runs",
        tuple(
            Run(at + n, Task.of(stored.key, payload or task_id, id=task_id))
            for n, task_id in enumerate(task_ids)
        ),
    )
    return Fire(key=stored.key, name=stored.name, **fields)


async def fire(bench: Bench, stored: StoredSchedule, *task_ids: str, **fields: Any) -> Fired:
    """Fire one schedule; with one task, unless the ids of its tasks are given."""
    (done,) = await schedules_of(bench.backend).fire(plan(stored, *(task_ids or ("t1",)), **fields))
    return done


async def refusal(bench: Bench) -> Outcome:
    """Return the attempt of the schedule that was refused."""
    stored = await schedules_of(bench.backend).get(NAME)
    assert stored is not None
    assert stored.refused is not None
    return stored.refused


def near(time: float | None, expected: float) -> bool:
    """Return whether a time is the expected one, to the microsecond."""
    return time is not None and abs(time - expected) < 2e-6
