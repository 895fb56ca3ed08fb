"""Lists of tasks in Redis: forged cursors, and keys that other programs have changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import product
from typing import Any

import msgspec
import pytest

from taskqueue_core.authoring.listings import Filters, Query
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import InvalidInput
from taskqueue_core.tasks import State, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, opened, publish, take
from tests.redis.meter import Meter
from tests.redis.resp import Resp
from tests.redis.servers import RedisServer
from tests.redis.test_damage import cut, name_of, remove

SCORES = (
    *("-", ".", "e", "1e400", "1e999", "--1", "1.2.3", "9" * 25, "1e+9e+9", "-9e+20", "+1"),
    *("0", "17", "1764487057000000", "1.7e+15", "99999999999999999", "inf", "-inf", "-1"),
    *("0-5", f"{'9' * 19}-9", f"{'9' * 20}-1", "17-0", "1-"),
)
SECTIONS = {
    State.WAITING: ("z0", "z5", "r5", "s5", "J"),
    State.IN_FLIGHT: ("5",),
    State.SCHEDULED: ("scheduled",),
    State.BLOCKED: ("blocked",),
    State.DEAD: ("dead",),
    State.DONE: ("done",),
}

FOREIGN = (b"x", b"\xff\x00\xff", b"\n", b"9" * 5000, b"", b"17:17", b"a\x00b\x00c")
"""members that a page cannot begin after, that are no text, or that look like a position"""


@pytest.fixture
async def backend(redis_server: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend of the shared server."""
    async with opened(redis_server.url, redis_prefix) as backend:
        yield backend


async def found(backend: RedisBackend, *, limit: int = 1, **query: Any) -> list[str]:
    """Return the ids of the tasks on all pages of a list."""
    names, after = list[str](), None
    while True:
        page = await backend.listing.tasks(KEY, after=after, limit=limit, **query)
        names += [task.task_id for task in page.tasks]
        assert page.next is None or page.looked_at, "the walk does not advance"
        after = page.next
        if after is None:
            return names


def positions() -> Iterator[tuple[State, bool, bytes]]:
    """Yield forged positions, with the list whose cursor contains them."""
    for state, sections in SECTIONS.items():
        for section, score, rest, newest in product(sections, SCORES, (":x", ""), (False, True)):
            yield state, newest, f"{section} {score}{rest}".encode()


async def test_forged_positions(backend: RedisBackend) -> None:
    """U18, U29: a position that the script never returned is refused, or shows tasks of the same list."""
    await publish(backend, "done", "dead", "flies", "waits")
    await publish(backend, "later", not_before=backend.now() + 900)
    async with backend.subscribe([KEY], "c") as consumer:
        done, dead, _ = await take(consumer, 3)
        await consumer.ack(done)
        await consumer.dead_letter(dead, "broken")
        expected = {state: set(await found(backend, state=state)) for state in SECTIONS}
        shown, refused = dict.fromkeys(SECTIONS, 0), set[str | None]()
        for state, newest, position in positions():
            cursor = Query(key=KEY, state=state, newest=newest).cursor(position)
            try:
                page = await backend.listing.tasks(KEY, state=state, newest=newest, after=cursor)
            except InvalidInput as error:
                refused.add(error.field)
                continue
            assert {task.task_id for task in page.tasks} <= expected[state]
            shown[state] += 1
        assert refused == {"after"}
        assert min(shown.values()) > 4


async def test_foreign_members(backend: RedisBackend, redis_server: RedisServer) -> None:
    """U18, U29: entries of another program are on no page, no walk fails, and maintenance removes those of tags."""
    await backend.control.configure(KEY, QueueSettings(index=("user",)))
    await publish(backend, "waits", tags=("user:1", "user:2"))
    await publish(backend, "too", tags=("user:1",))
    await publish(backend, "later", not_before=backend.now() + 900)
    name = name_of(backend)
    for member in FOREIGN:
        for key, score in (("d", "inf"), ("d", "-1.5"), ("d", "-inf"), ("i", "0"), ("J", "3")):
            prefix = b"user:1\0" if key == "i" else b""
            redis_server.call("ZADD", f"{name}/{key}", score, prefix + member)
        redis_server.call("HSET", f"{name}/I", member, member)
        redis_server.call("RPUSH", f"{name}/l", member)
        redis_server.call("XADD", f"{name}/s5", "*", member or b"?", member)
        redis_server.call("XADD", f"{name}/s5", "*", member or b"?", member, "b", "c")
    for newest in (False, True):
        order = ["too", "waits"] if newest else ["waits", "too"]
        assert await found(backend, state=State.WAITING, newest=newest) == order
        assert await found(backend, state=State.SCHEDULED, newest=newest) == ["later"]
        assert await found(backend, state=State.DONE, newest=newest) == []
        assert await found(backend, tag="user:1", newest=newest) == order
    await backend.control.maintain()
    assert redis_server.call("ZCARD", f"{name}/i") == 3
    assert sorted(redis_server.call("HKEYS", f"{name}/I")) == [b"too", b"waits"]


async def test_a_search_by_time_among_foreign_entries(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U18, U29: what another program wrote into a list hides no task from a search by time."""
    names = [f"t{n:02}" for n in range(40)]
    await publish(backend, *names)
    list_name = f"{name_of(backend)}/l"
    async with backend.subscribe([KEY], "c") as consumer:
        for delivery in await take(consumer, len(names)):
            await consumer.ack(delivery)
            for member in (b"x", b"", b"\xff:t")[: int(delivery.task.id[1:]) % 4]:
                redis_server.call("RPUSH", list_name, member)
    listed = (await backend.listing.tasks(KEY, state=State.DONE)).tasks
    for since, until in ((5, 9), (0, 1), (20, 39), (38, 39)):
        times = {"since": listed[since].updated_at, "until": listed[until].updated_at}
        for limit, newest in product((1, 3, 100), (False, True)):
            shown = await found(backend, state=State.DONE, newest=newest, limit=limit, **times)
            assert sorted(shown) == names[since:until]


async def test_dead_letters_of_an_earlier_version(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U18: a dead letter without the worker of its last delivery has the one of its last failure."""
    await publish(backend, "t")
    async with backend.subscribe([KEY], "c") as consumer:
        (delivery,) = await take(consumer, 1)
        await consumer.dead_letter(delivery, "broken", "error")
    name = f"{name_of(backend)}/x"
    cold = msgspec.msgpack.decode(redis_server.call("HGET", name, "t"))
    assert cold.pop("w") == "c"
    assert abs(cold.pop("s") / 1e6 - delivery.delivered_at) < 1
    redis_server.call("HSET", name, "t", msgspec.msgpack.encode(cold))
    (task,) = (await backend.listing.tasks(KEY, state=State.DEAD, worker="c")).tasks
    assert (task.worker_id, task.delivered_at) == ("c", None)
    assert await found(backend, state=State.DEAD, worker="d") == []


async def test_a_call_looks_at_a_limited_number_of_records(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U18: one script call looks at 500 records, including those by which it finds a time."""
    budgets, run = list[int](), backend.listing._run

    async def noted(script: str, key: str, *args: Any) -> Any:
        budgets.append(args[3])
        return await run(script, key, *args)

    monkeypatch.setattr(backend.listing, "_run", noted)
    dead: Filters = {"state": State.DEAD}
    every: tuple[Filters, ...] = (dead, {**dead, "since": 1.0}, {**dead, "until": 9.0})
    for filters in every:
        await backend.listing.tasks(KEY, **filters)
    assert budgets == [500, 460, 460]


def records_per_call(server: RedisServer, monitor: Resp) -> list[int]:
    """Return how many records each script call has read since the last time, most recent last."""
    server.call("ECHO", "seen")
    calls = [0]
    while '"ECHO" "seen"' not in (line := monitor._read()):
        words = line.split('"')[1::2]
        if words[0] == "EVALSHA":
            calls.append(0)
        elif words[0] in ("HGET", "HMGET") and words[1].endswith("/t"):
            calls[-1] += len(words) - 2
    return calls[1:]


async def test_a_call_reads_a_limited_number_of_records(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U18: a script call reads 500 records and the one after them, in each state, if no task has what is asked for."""
    number, soon = 1100, backend.now() + 9
    await backend.control.configure(KEY, QueueSettings(index=("user",), keep_ended=900))
    for kind in ("waits", "later"):
        start = soon if kind == "later" else None
        names = [f"{kind}{n}" for n in range(number if start else 4 * number)]
        of_one = [
            Task(key=KEY, id=i, tenant="a", tags=("user:1",), not_before=start) for i in names
        ]
        await backend.publisher.publish(*of_one)
    states = (State.WAITING, State.IN_FLIGHT, State.SCHEDULED, State.DEAD, State.DONE)
    async with backend.subscribe([KEY], "c") as consumer:
        await consumer.ack(*await take(consumer, number))
        for delivery in await take(consumer, number):
            await consumer.dead_letter(delivery, "broken")
        await take(consumer, number)
        lists: list[dict[str, Any]] = [{"tag": "user:1"}, *({"state": state} for state in states)]
        by_time: list[dict[str, Any]] = [
            {"state": state, "since": 1.0, "until": soon + 9} for state in states[2:]
        ]
        wanted: tuple[dict[str, Any], ...] = ({}, {"tenant": "b"}, {"tenant": "a"})
        most = 0
        with redis_server.connect() as monitor:
            monitor.call("MONITOR")
            for filters, more, newest in product(lists + by_time, wanted, (False, True)):
                await backend.listing.tasks(KEY, limit=1000, newest=newest, **{**filters, **more})
                calls = records_per_call(redis_server, monitor)
                assert max(calls) <= 501, (filters, more, newest)
                most = max(most, *calls)
        assert most > 490
        assert len(await backend.dead_letters.list(KEY, limit=1000)) == 1000


@pytest.mark.parametrize("damage", ["missing", "lost", "changed"])
async def test_damaged_tags(damage: str, backend: RedisBackend, redis_server: RedisServer) -> None:
    """U18, U29: maintenance restores the tags of live tasks from their bodies, also what their index had."""
    await backend.control.configure(KEY, QueueSettings(index=("user",)))
    await publish(backend, "t", tags=("user:1", "other:1"))
    name = name_of(backend)
    if damage == "missing":
        redis_server.call("DEL", f"{name}/I", f"{name}/i")
    elif damage == "lost":
        redis_server.call("HDEL", f"{name}/I", "t")
    else:
        redis_server.call("HSET", f"{name}/I", "t", "x")
    assert await found(backend, tag="user:1") == []
    assert await found(backend, state=State.WAITING) == ["t"]
    for _ in range(2):
        await backend.control.maintain()
    assert await found(backend, tag="user:1") == ["t"]
    (task,) = (await backend.listing.tasks(KEY, state=State.WAITING)).tasks
    assert task.tags == ("user:1", "other:1")
    assert redis_server.call("ZCARD", f"{name}/i") == 1
    assert await backend.control.cancel(KEY, "t")


@pytest.mark.parametrize("damage", [remove, cut])
async def test_tasks_with_damaged_records(
    damage: Callable[[RedisServer, str, str], None],
    backend: RedisBackend,
    redis_server: RedisServer,
) -> None:
    """U18, U29: a task whose record is missing or damaged is listed by what else the store has of it."""
    due = round(backend.now()) + 900
    fields: dict[str, Any] = {"tenant": "acme", "tags": ("user:1",), "priority": 7}
    await publish(backend, "dead", "flies", **fields)
    await publish(backend, "first", "held", ordering_key="e", **fields)
    await publish(backend, "later", not_before=due, **fields)
    async with backend.subscribe([KEY], "c") as consumer:
        dead, _ = await take(consumer, 2)
        await consumer.dead_letter(dead, "broken")
        for task in ("dead", "flies", "first", "held", "later"):
            damage(redis_server, name_of(backend), task)
        for state, tasks in (
            (State.WAITING, ["first", "held"]),
            (State.IN_FLIGHT, ["flies"]),
            (State.SCHEDULED, ["later"]),
            (State.DEAD, ["dead"]),
        ):
            listed = (await backend.listing.tasks(KEY, state=state)).tasks
            assert [task.task_id for task in listed] == tasks
            assert {(task.tenant, task.tags, task.state) for task in listed} == {
                ("acme", ("user:1",), state)
            }
            assert {task.due_at for task in listed} == {due if state is State.SCHEDULED else None}
            if state in (State.WAITING, State.IN_FLIGHT):  # the lane tells
                assert listed[0].priority == 7


async def test_pages_of_tasks_in_flight(backend: RedisBackend) -> None:
    """U18: fresh and released tasks in flight, of one worker or of all, are in one order on pages of every size."""
    names = [f"t{number:02}" for number in range(24)]
    await publish(backend, *names)
    async with backend.subscribe([KEY], "a") as a, backend.subscribe([KEY], "b") as b:
        taken = await take(a, 20)
        for delivery in taken[3:17]:
            await a.redeliver(delivery)
        of_b = [delivery.task.id for delivery in await take(b, 6)]
        await take(a, 5)
        running = names[:3] + names[17:20] + names[3:14]  # released ones became available later
        assert of_b == names[3:9]
        for worker, expected in (
            (None, running),
            ("a", [name for name in running if name not in of_b]),
            ("b", of_b),
        ):
            for limit in (1, 2, 3, 7, 100):
                query: dict[str, Any] = {"state": State.IN_FLIGHT, "worker": worker, "limit": limit}
                assert await found(backend, **query) == expected
                assert await found(backend, newest=True, **query) == expected[::-1]


@pytest.mark.parametrize("order", list(Order))
async def test_tasks_of_one_tenant(
    order: Order, backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U18: a list by tenant has the order of the whole list, and takes few commands for the tasks of others.

    With fair order, only tasks of the tenant are read. The list is the same while a queue is being sorted by tenant.
    """
    tenants = {f"t{n:03}": f"tenant-{n % 40}" if n % 40 else None for n in range(400)}
    tasks = [Task(key=KEY, id=name, tenant=tenant) for name, tenant in tenants.items()]
    await backend.publisher.publish(*tasks[:200])
    await backend.control.configure(KEY, QueueSettings(order=order, keep_ended=900))
    await backend.publisher.publish(*tasks[200:])
    async with backend.subscribe([KEY], "c") as consumer:
        taken = await take(consumer, 120)
        await consumer.ack(*taken[:40])
        await consumer.redeliver(*taken[80:])
        await take(consumer, 20)
        meter = Meter(backend, redis_server)
        for state in (State.WAITING, State.IN_FLIGHT, State.DONE):
            everything = await found(backend, state=state, limit=1000)
            assert len(everything) > 30
            for newest in (False, True):
                expected = everything[::-1] if newest else everything
                for tenant in ("tenant-7", "tenant-39"):
                    own = [name for name in expected if tenants[name] == tenant]
                    for limit in (1, 3, 1000):
                        query: dict[str, Any] = {"state": state, "newest": newest, "limit": limit}
                        assert await found(backend, tenant=tenant, **query) == own
        meter.costs.clear()
        page = await backend.listing.tasks(KEY, state=State.WAITING, tenant="tenant-7")
        assert meter.costs["list"].commands < 60
        assert page.tasks
        if order is Order.FAIR:
            assert page.looked_at < 60
        meter.costs.clear()
        page = await backend.listing.tasks(KEY, state=State.IN_FLIGHT, tenant="tenant-7")
        assert page.looked_at > 50
        assert meter.costs["list"].commands < (50 if order is Order.FIFO else 80)
    meter.close()


async def test_foreign_members_of_a_lane(backend: RedisBackend, redis_server: RedisServer) -> None:
    """U18, U29: what another program writes to the lane of a tenant is on no page, and no walk of it is endless."""
    await backend.control.configure(KEY, QueueSettings(order=Order.FAIR))
    await publish(backend, "a", "b", tenant="acme")
    for member in (*FOREIGN, b"s0", b"s1", b"s" + b"9" * 30, b"r17"):
        for score in ("-3", "0", "0.5", "3.5", "1e300", "inf"):
            name = f"{name_of(backend)}/y5:acme"
            redis_server.call("ZADD", name, score, member + score.encode())
    for newest in (False, True):
        order = ["b", "a"] if newest else ["a", "b"]
        assert await found(backend, state=State.WAITING, tenant="acme", newest=newest) == order


async def test_the_times_of_a_task(backend: RedisBackend) -> None:
    """U18: lists and details have the time of the last delivery, also after the end; details that of the publish."""
    await backend.control.configure(KEY, QueueSettings(keep_ended=60))
    await publish(backend, "t")
    found = await backend.listing.task(KEY, "t")
    assert found is not None
    assert found.published_at == pytest.approx(backend.now(), abs=5)
    assert found.delivered_at is None
    async with backend.subscribe([KEY], "w") as consumer:
        (delivery,) = await take(consumer, 1)
        await asyncio.sleep(0.3)
        for state in (State.IN_FLIGHT, State.DONE):
            found = await backend.listing.task(KEY, "t")
            assert found is not None
            (listed,) = (await backend.listing.tasks(KEY, state=state)).tasks
            for at in (found.delivered_at, listed.delivered_at):
                assert at == pytest.approx(delivery.delivered_at, abs=0.1)
            await consumer.ack(delivery)
        await publish(backend, "dead")
        (delivery,) = await take(consumer, 1)
        await consumer.dead_letter(delivery, "why", "error")
        (listed,) = (await backend.listing.tasks(KEY, state=State.DEAD)).tasks
        assert listed.delivered_at == pytest.approx(delivery.delivered_at, abs=0.1)


async def test_a_damaged_record_of_a_tenant(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U18: a record that is damaged is read from the task's body, although it seems to have another tenant."""
    await backend.publisher.publish(Task(key=KEY, id="t", tenant="acme"))
    name = f"{name_of(backend)}/t"
    record: bytes = redis_server.call("HGET", name, "t")
    redis_server.call("HSET", name, "t", b"\xff" + record[1:].replace(b"acme/", b"beta/"))
    assert await found(backend, state=State.WAITING, tenant="acme") == ["t"]
