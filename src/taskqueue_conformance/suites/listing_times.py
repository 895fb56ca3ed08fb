"""Lists of tasks by time: those that ended, became dead letters or become available between two times."""

from __future__ import annotations

from itertools import combinations
from math import inf, nan
from typing import Any

import pytest

from taskqueue_conformance.bench import KEY, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.listing import NAMES, page_of, shows, summaries, walk
from taskqueue_core.authoring.listings import BY_TIME
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import TaskSummary, dead_lettering_of, listing_of
from taskqueue_core.tasks import Delivery, State


def _time(task: TaskSummary) -> float:
    """Return the time by which the list of the task's state is sorted."""
    return task.updated_at if task.due_at is None else task.due_at


async def _shows_times(bench: Bench, state: State) -> None:
    """Fail unless the list of a state shows what was between two times, for the time of each task and for no time."""
    found = await summaries(bench, state)
    times = sorted({_time(task) for task in found})
    assert len(times) > 2, "the tasks of the test have too few times"
    for since, until in combinations([None, *times, None], 2):
        between = [
            task.task_id
            for task in found
            if (since is None or since <= _time(task)) and (until is None or _time(task) < until)
        ]
        limits: dict[str, Any] = {"since": since, "until": until}
        await shows(bench, between, state, **limits)
        for newest in (False, True):
            page = await page_of(bench, state, newest=newest, limit=1000, **limits)
            assert page.next is None, "there is a page after the last task between the times (U18)"
            assert page.looked_at == len(between), "a page looks at tasks of other times (U18)"
            assert len(await walk(bench, state, newest=newest, limit=1, **limits)) == len(between)


def _was_delivered(bench: Bench, task: TaskSummary, delivery: Delivery) -> None:
    near = pytest.approx(delivery.delivered_at, abs=bench.short / 2)
    assert task.delivered_at in (None, near), "delivered_at is the time of another event (U18)"


class ListingTimesSuite(Harness, needs=(Capability.LISTING,)):
    """Tests of ``since`` and ``until`` of `taskqueue_core.capabilities.Listing.tasks`, and of the last worker."""

    async def test_scheduled_tasks_by_time(self, bench: Bench) -> None:
        """Scheduled tasks are listed by when they become available: ``since <= time < until`` (law 11; U18)."""
        now = round(bench.now)
        for name, delay in zip(NAMES, (900, 300, 600, 300, 300, 1200, 900), strict=True):
            await bench.publish(name, not_before=now + delay)
        await _shows_times(bench, State.SCHEDULED)
        assert await walk(bench, State.SCHEDULED, since=now + 1201) == []
        assert await walk(bench, State.SCHEDULED, until=now + 300) == []
        assert len(await walk(bench, State.SCHEDULED, since=now, until=now + 901, tenant="a")) == 0

    async def test_ended_tasks_by_time(self, bench: Bench) -> None:
        """Ended tasks are listed by when they ended (law 11; U18)."""
        subscription, *running = await bench.all_running(*NAMES)
        for delivery in running[:4]:
            await subscription.ack(delivery)
            await bench.advance(bench.short)
        await subscription.ack(*running[4:])
        await _shows_times(bench, State.DONE)

    @needs(Capability.DEAD_LETTERS)
    async def test_dead_letters_by_time_and_worker(self, bench: Bench) -> None:
        """Dead letters are listed by when they died, and by the worker of their last delivery (law 11; U18)."""
        await bench.publish(*NAMES[:5])
        first, second = bench.subscribe(consumer="w1"), bench.subscribe(consumer="w2")
        given = dict[str, Delivery]()
        for subscription in (first, second, first):
            await bench.advance(bench.short)
            delivery = await bench.one(subscription)
            given[delivery.task.id] = delivery
            await bench.bury(subscription, delivery)
        await bench.advance(bench.short)
        for delivery in await bench.take(second, 2):
            given[delivery.task.id] = delivery
            await dead_lettering_of(bench.backend, second).dead_letter(delivery, "bad")
        await _shows_times(bench, State.DEAD)
        for worker, names in (("w1", ["t0", "t2"]), ("w2", ["t1", "t3", "t4"]), ("w3", [])):
            await shows(bench, names, State.DEAD, worker=worker, limit=1)
            for task in await summaries(bench, State.DEAD, worker=worker):
                assert task.worker_id == worker
                _was_delivered(bench, task, given[task.task_id])
        await bench.dead_letters.redrive(KEY, "t0")
        assert [task.worker_id for task in await summaries(bench)] == [None]
        assert await walk(bench, State.DEAD, worker="w1") == ["t2"]

    @needs(Capability.CONTROL)
    async def test_what_a_worker_ran_at_a_time(self, bench: Bench) -> None:
        """Kept tasks are found by worker and time, with the time of their delivery, as those in flight are (U18)."""
        await bench.configure(keep_ended=3600.0)
        await bench.publish("t0", "t1")
        subscription, given = bench.subscribe(), list[Delivery]()
        for _ in range(2):
            await bench.advance(bench.short)
            given.append(await bench.one(subscription))
            (running,) = await summaries(bench, State.IN_FLIGHT, worker="worker")
            _was_delivered(bench, running, given[-1])
            await subscription.ack(given[-1])
        ran = await summaries(bench, State.DONE, worker="worker")
        for task, delivery in zip(ran, given, strict=True):
            _was_delivered(bench, task, delivery)
        since = ran[1].updated_at
        assert await walk(bench, State.DONE, worker="worker", since=since) == ["t1"]
        assert await walk(bench, State.DONE, worker="worker", until=since) == ["t0"]
        assert await walk(bench, State.DONE, worker="w2", until=since) == []

    async def test_times_that_no_list_has(self, bench: Bench) -> None:
        """``since`` and ``until`` are refused for other lists, and if they are no times or not in order (U18)."""
        listing = listing_of(bench.backend)
        for state in set(State) - set(BY_TIME):
            await bench.invalid("since", listing.tasks(KEY, state=state, since=5.0))
            await bench.invalid("until", listing.tasks(KEY, state=state, until=5.0))
        await bench.invalid("since", listing.tasks(KEY, state=State.DONE, tag="user:1", since=5.0))
        for wrong in (nan, inf, -1.0, "5", True, 1e300):
            times: dict[str, Any] = {"since": wrong}
            await bench.invalid("since", listing.tasks(KEY, state=State.DONE, **times))
        for until in (5.0, 4.0):
            await bench.invalid(
                "until", listing.tasks(KEY, state=State.DONE, since=5.0, until=until)
            )

    async def test_cursor_of_another_time(self, bench: Bench) -> None:
        """A cursor belongs to its times; with others it is refused (U18)."""
        now = round(bench.now)
        for number, name in enumerate(NAMES):
            await bench.publish(name, not_before=now + 600 + number)
        times = {"since": now + 601.0, "until": now + 606.0}
        cursor = (await page_of(bench, State.SCHEDULED, **times)).next
        for query in ({"since": now + 600.0}, {"until": None}, {"since": None}):
            call = {"after": cursor} | times | query
            await bench.invalid("after", page_of(bench, State.SCHEDULED, **call))
        assert await walk(bench, State.SCHEDULED, after=cursor, **times) == ["t4", "t5"]
