"""Lists of tasks by state: their order, their pages, and walks through all pages while tasks change state."""

from __future__ import annotations

from itertools import product
from math import inf, nan
from random import Random
from typing import Any

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.partitions import after
from taskqueue_conformance.selection import needs
from taskqueue_core.authoring.listings import Query
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import TaskPage, TaskSummary, listing_of
from taskqueue_core.capabilities.listing import LOOKED_AT
from taskqueue_core.errors import InvalidInput
from taskqueue_core.tasks import State

NAMES = tuple(f"t{number}" for number in range(7))
_POSITIONS: tuple[object, ...] = (
    *(None, True, -1, 2**64 - 1, inf, nan, "", "\0", "x" * 300, b"\xff", {}, ()),
    *((0,), (-1, None), (2**63, None), (0, "x"), (nan,), (inf, -inf), ("~",), ("\0",), ((),)),
)
"""what a forged cursor may contain"""


async def page_of(bench: Bench, state: State | None = State.WAITING, **query: Any) -> TaskPage:
    """Return a page of a list, after the checks that hold for every page."""
    page = await listing_of(bench.backend).tasks(
        query.pop("key", KEY), state=state, **{"limit": 3} | query
    )
    assert len(page.tasks) <= query.get("limit", 3), "a page has more tasks than its limit"
    assert len(page.tasks) <= page.looked_at <= LOOKED_AT, "looked_at is not the number of records"
    return page


async def walk(bench: Bench, state: State | None = State.WAITING, **query: Any) -> list[str]:
    """Return the ids of the tasks on all pages of a list; fail if a task is there twice."""
    return [task.task_id for task in await summaries(bench, state, **query)]


async def summaries(
    bench: Bench, state: State | None = State.WAITING, **query: Any
) -> list[TaskSummary]:
    """Return the tasks on all pages of a list; fail if a task is there twice."""
    found, cursor = list[TaskSummary](), query.pop("after", None)
    for _ in range(200):
        page = await page_of(bench, state, after=cursor, **query)
        found += page.tasks
        cursor = page.next
        if cursor is None:
            break
    assert cursor is None, "a walk does not end (law 11)"
    names = [task.task_id for task in found]
    assert len(set(names)) == len(names), f"a walk shows a task twice: {names} (law 11)"
    return found


async def shows(bench: Bench, expected: list[str], state: State, **query: Any) -> None:
    """Fail unless a list has these tasks in this order, and the newest first in the reverse order."""
    found = await walk(bench, state, **query)
    assert found == expected, f"the list of {state.value} tasks has another order (law 11)"
    found = await walk(bench, state, newest=True, **query)
    assert found == expected[::-1], f"newest is not the reverse for {state.value} tasks (law 11)"


class ListingSuite(Harness, needs=(Capability.LISTING,)):
    """Tests of `taskqueue_core.capabilities.Listing.tasks` by state."""

    async def test_lists_of_an_unknown_queue(self, bench: Bench) -> None:
        """The lists of a queue that was never used are empty, and no task of another queue is there (U18)."""
        await bench.publish("t1", key=OTHER)
        for state in State:
            assert await page_of(bench, state) == TaskPage()
        assert await listing_of(bench.backend).task(KEY, "t1") is None

    async def test_list_of_waiting_tasks(self, bench: Bench) -> None:
        """Waiting tasks are listed by priority and position, and a delivery follows the list (law 11; U18)."""
        for name, priority in zip(NAMES, (5, 9, 0, 5, 9, 5, 0), strict=True):
            await bench.publish(name, priority=priority, tenant="a", headers={"h": "1"})
        order = ["t1", "t4", "t0", "t3", "t5", "t2", "t6"]
        await shows(bench, order, State.WAITING)
        await shows(bench, order, State.WAITING, limit=1)
        await shows(bench, order, State.WAITING, limit=1000)
        (first, *_) = await summaries(bench)
        assert bench.now - 60 < first.updated_at <= bench.now + 60
        assert first == TaskSummary(
            key=KEY,
            task_id="t1",
            state=State.WAITING,
            priority=9,
            tenant="a",
            updated_at=first.updated_at,
        )
        assert ids(await bench.take(bench.subscribe(), 9)) == order

    async def test_released_tasks_come_first(self, bench: Bench) -> None:
        """A released task is listed at its old place, before those of its priority that were not delivered (U18)."""
        subscription, *running = await bench.all_running("t0", "t1", "t2")
        await bench.publish("t3")
        await bench.publish("t4", priority=9)
        await subscription.redeliver(running[1])
        await subscription.redeliver(running[0])
        await shows(bench, ["t4", "t0", "t1", "t3"], State.WAITING)

    async def test_list_of_scheduled_tasks(self, bench: Bench) -> None:
        """Scheduled tasks are listed by their time, which the summary has; ties have some order (law 11; U18)."""
        now = round(bench.now)
        for name, delay in zip(NAMES, (900, 300, 600, 300, 300, 300, 1200), strict=True):
            await bench.publish(name, not_before=now + delay)
        found = await summaries(bench, State.SCHEDULED)
        assert [task.due_at for task in found] == [now + s for s in (300,) * 4 + (600, 900, 1200)]
        names = [task.task_id for task in found]
        assert sorted(names) == list(NAMES)
        await shows(bench, names, State.SCHEDULED, limit=2)

    async def test_list_of_tasks_in_flight(self, bench: Bench) -> None:
        """Tasks in flight are listed with their workers, and by worker (U18)."""
        await bench.publish("t0", "t1", "t3")
        await bench.publish("t2", priority=8)
        first, second = bench.subscribe(consumer="w1"), bench.subscribe(consumer="w2")
        await bench.take(first, 2)
        await bench.take(second, 2)
        await shows(bench, ["t2", "t0", "t1", "t3"], State.IN_FLIGHT)
        found = await summaries(bench, State.IN_FLIGHT)
        assert [task.worker_id for task in found] == ["w1", "w1", "w2", "w2"]
        await shows(bench, ["t1", "t3"], State.IN_FLIGHT, worker="w2", limit=1)
        assert await walk(bench, State.IN_FLIGHT, worker="w3") == []
        assert await walk(bench) == []

    async def test_released_tasks_in_flight(self, bench: Bench) -> None:
        """A task in flight that was released before is listed by its last delivery (law 11; U18)."""
        subscription, *running = await bench.all_running("t0", "t1", "t2")
        await subscription.redeliver(running[1])
        await subscription.redeliver(running[0])
        await bench.publish("t3")
        (again,) = await bench.take(subscription, 1)
        await shows(bench, ["t1", "t3"], State.WAITING)
        await shows(bench, ["t2", "t0"], State.IN_FLIGHT)
        await bench.take(subscription, 2)
        await shows(bench, ["t2", "t3", "t0", "t1"], State.IN_FLIGHT, limit=1)
        await subscription.redeliver(again)
        await bench.take(subscription, 1)
        await shows(bench, ["t2", "t3", "t1", "t0"], State.IN_FLIGHT)

    @needs(Capability.DEAD_LETTERS)
    async def test_list_of_dead_tasks(self, bench: Bench) -> None:
        """Dead tasks are listed in the order in which they died, with their reason, cut to 200 characters (U18)."""
        subscription, *running = await bench.all_running(*NAMES)
        for delivery in running:
            await bench.bury(subscription, delivery, "r" * 300)
        await shows(bench, list(NAMES), State.DEAD)
        assert {task.error for task in await summaries(bench, State.DEAD)} == {"r" * 200}
        found = await listing_of(bench.backend).task(KEY, "t0")
        assert found is not None
        assert found.status.state is State.DEAD
        assert [(each.attempt, each.worker) for each in found.history] == [(1, "worker")]

    @needs(Capability.AFTER)
    async def test_list_of_blocked_tasks(self, bench: Bench) -> None:
        """Blocked tasks are listed in the order in which they became blocked (U18)."""
        await bench.publish("parent")
        for name in NAMES:
            await bench.publish(name, after=after("parent"))
        await shows(bench, list(NAMES), State.BLOCKED)

    @needs(Capability.ORDERING_KEYS)
    async def test_tasks_that_wait_for_their_ordering_key(self, bench: Bench) -> None:
        """Tasks that wait for their ordering key are listed after the others (U18)."""
        await bench.publish("t0", "t1", "t2", ordering_key="e")
        await bench.publish("t3")
        await shows(bench, ["t0", "t3", "t1", "t2"], State.WAITING)
        found = await summaries(bench)
        assert [task.ordering_key for task in found] == ["e", None, "e", "e"]

    @needs(Capability.FAIR_ORDER, Capability.CONTROL)
    async def test_fair_order_does_not_change_a_list(self, bench: Bench) -> None:
        """With fair order, waiting tasks are listed by priority and position, and those in flight are not (U18)."""
        await bench.fair()
        for name in NAMES:
            await bench.publish(name, tenant="a" if name < "t5" else "b")
        running = await bench.take(bench.subscribe(), 3)
        rest = [name for name in NAMES if name not in ids(running)]
        await shows(bench, rest, State.WAITING)
        assert sorted(await walk(bench, State.IN_FLIGHT)) == sorted(ids(running))
        await shows(bench, [n for n in rest if n >= "t5"], State.WAITING, tenant="b", limit=1)

    async def test_list_of_a_tenant(self, bench: Bench) -> None:
        """A list of a tenant has its tasks alone; records that were skipped count as looked at (law 11; U18)."""
        for name in NAMES:
            await bench.publish(name, tenant="a" if name in ("t2", "t6") else "b")
        await bench.publish("t7")
        await shows(bench, ["t2", "t6"], State.WAITING, tenant="a", limit=1)
        assert await walk(bench, tenant="c") == []
        page = await page_of(bench, tenant="c")
        assert page.next is not None or page.looked_at == 8

    async def test_a_walk_while_tasks_leave(self, bench: Bench) -> None:
        """What stays in the state is on exactly one page, while others leave and enter (law 11; U18)."""
        await bench.publish(*(f"t{number:02}" for number in range(12)))
        first = await page_of(bench)
        subscription = bench.subscribe()
        taken = await bench.take(subscription, 5)  # also the task at which the page ended
        await subscription.ack(*taken)
        await bench.publish("late")
        rest = await walk(bench, after=first.next)
        stayed = [f"t{number:02}" for number in range(5, 12)]
        assert [name for name in rest if name != "late"] == stayed, "a task was left out (law 11)"
        newest = await page_of(bench, newest=True)
        await bench.take(subscription, 2)
        await bench.publish("later", priority=9)
        rest = await walk(bench, after=newest.next, newest=True)
        assert [name for name in rest if name != "later"] == [f"t{n:02}" for n in (9, 8, 7)]

    @needs(Capability.CONTROL)
    async def test_a_walk_while_scheduled_tasks_leave(self, bench: Bench) -> None:
        """The same for scheduled tasks, of which many have the same time (U18)."""
        at = round(bench.now) + 600
        for number in range(9):
            await bench.publish(f"t{number}", not_before=at)
        order = await walk(bench, State.SCHEDULED)
        page = await page_of(bench, State.SCHEDULED)
        for name in (order[0], order[2], order[4]):
            assert await bench.control.cancel(KEY, name)
        await bench.publish("early", not_before=at - 60)
        rest = await walk(bench, State.SCHEDULED, after=page.next, limit=1)
        assert rest == [order[3], *order[5:]], "a task was left out or is there twice (law 11)"
        newest = await page_of(bench, State.SCHEDULED, newest=True, limit=1)
        assert await bench.control.cancel(KEY, order[8])
        rest = await walk(bench, State.SCHEDULED, after=newest.next, newest=True)
        assert rest == [*order[7:4:-1], order[3], order[1], "early"]

    async def test_refused_queries(self, bench: Bench) -> None:
        """A combination that no list has is refused with the name of the argument, and never a crash (U18)."""
        for field, query in (
            ("state", {"state": None}),
            ("key", {"key": "not a name"}),
            ("tenant", {"tenant": "not a name"}),
            ("worker", {"worker": "w1"}),
            ("worker", {"state": State.DONE, "worker": "w1"}),
            ("worker", {"state": State.IN_FLIGHT, "worker": "not a name"}),
            ("limit", {"limit": 0}),
            ("limit", {"limit": 1001}),
            ("tag", {"tag": " user:1"}),
            ("tag", {"tag": "user:1"}),
            ("tag", {"tag": "user:1", "state": None}),
        ):
            call = {"key": KEY, "state": State.WAITING} | query
            await bench.invalid(field, listing_of(bench.backend).tasks(**call))

    async def test_cursor_of_another_query(self, bench: Bench) -> None:
        """A cursor belongs to its queue, filters and order; with another of them it is refused (U18)."""
        for key in (KEY, OTHER):
            await bench.publish(*NAMES, key=key, tenant="a")
        cursor = (await page_of(bench)).next
        for query in (
            {"key": OTHER},
            {"state": State.IN_FLIGHT},
            {"tenant": "a"},
            {"newest": True},
            {"state": State.SCHEDULED},
        ):
            await bench.invalid("after", page_of(bench, **{"after": cursor} | query))
        assert len(await walk(bench, after=cursor, limit=2)) == 4  # the limit may differ

    async def test_damaged_cursors(self, bench: Bench) -> None:
        """A damaged or forged cursor is refused, or shows another page of the same list, and nothing else (U18)."""
        await bench.publish(*NAMES)
        cursor = (await page_of(bench)).next
        assert cursor is not None
        random = Random(11)
        forged = ["", "!", "é" * 9, "A" * 100_000, cursor[:-1], cursor * 2, f"{cursor}=", "\0"]
        for _ in range(40):
            place = random.randrange(len(cursor))
            forged.append(cursor[:place] + random.choice("AZaz09_-") + cursor[place + 1 :])
        for text in forged:
            shown = await _shown_or_refused(bench, text)
            assert shown <= set(NAMES)
            assert text not in forged[:4] or not shown, "a forged cursor was accepted"
        for state in (State.WAITING, State.IN_FLIGHT, State.SCHEDULED, State.DEAD, State.DONE):
            for position, newest in product(_POSITIONS, (False, True)):
                forgery = Query(key=KEY, state=state, newest=newest).cursor(position)
                shown = await _shown_or_refused(bench, forgery, state=state, newest=newest)
                assert shown <= set(NAMES if state is State.WAITING else ())


async def _shown_or_refused(bench: Bench, cursor: str, **query: Any) -> set[str]:
    """Return the ids on the page at a cursor; an empty set if the cursor is refused."""
    try:
        page = await page_of(bench, after=cursor, **query)
    except InvalidInput as error:
        if error.field != "after":
            raise
        return set()
    return {task.task_id for task in page.tasks}
