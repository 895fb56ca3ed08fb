"""Large calls: scripts read and answer a bounded amount, and the largest sizes neither fail nor lose anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskqueue_cli.commands.stats import read_queues
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.concurrency import gather_all
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Delivery, Published, Settled, Task
from taskqueue_redis import RedisBackend
from taskqueue_redis.receiver import Receiver
from tests.redis.backends import KEY, opened, publish
from tests.redis.largest import LARGE, SCRIPTS, measure, received, size_of
from tests.redis.recount import recounted
from tests.redis.script_costs import BOUNDS
from tests.redis.servers import RedisServer

BYTES = 4 * 1024 * 1024
"""number of bytes after which a script ends its work"""
AT_ONCE = 16
"""number of large bodies that a script reads at once"""
MOST = BYTES + (AT_ONCE + 1) * LIMITS.payload
"""upper limit of the bytes that one script call passes or returns"""
QUEUES: dict[str, QueueSettings] = {
    "fifo": QueueSettings(max_processing_time=600.0, journal=True),
    "fair": QueueSettings(order=Order.FAIR, tenant_max_inflight=100_000),
}


class Calls:
    """The script calls of a backend, with the number of bytes that each passes and returns."""

    def __init__(self, backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[tuple[str, int, int]] = []
        inner = backend._context.scripts.run

        async def run(name: str, partition: str, *args: Any, **options: Any) -> Any:
            reply = await inner(name, partition, *args, **options)
            self.sizes.append((name, size_of(args), size_of(reply)))
            return reply

        monkeypatch.setattr(backend._context.scripts, "run", run)

    def of(self, name: str) -> list[int]:
        """Return how many bytes each call of a script passed and returned."""
        return [passed + returned for script, passed, returned in self.sizes if script == name]


@asynccontextmanager
async def calm(server: RedisServer, prefix: str) -> AsyncIterator[RedisBackend]:
    """Open a backend whose leases do not expire during a test."""
    async with opened(server.url, prefix, lease=60.0) as backend:
        yield backend


async def fill(backend: RedisBackend, number: int, **fields: Any) -> None:
    """Publish tasks of 50 tenants in one call."""
    tasks = [Task(key=KEY, id=f"t{n}", tenant=f"u{n % 50}", **fields) for n in range(number)]
    for answer in await backend.publisher.publish(*tasks):
        assert answer.status is Published.ACCEPTED


@pytest.mark.parametrize("name", QUEUES)
async def test_the_largest_receive(redis_server: RedisServer, redis_prefix: str, name: str) -> None:
    """Law 1: a receive with the largest limit fails in no kind of queue, and every task is delivered and settled."""
    async with calm(redis_server, redis_prefix) as backend:
        await backend.control.configure(KEY, QUEUES[name])
        await fill(backend, 9500)
        async with backend.subscribe([KEY], "c") as consumer:
            taken = await received(consumer, 9500)
            assert recounted(redis_server, redis_prefix)[KEY]["in_flight"] == 9500
            assert set(await consumer.redeliver(*taken)) == {Settled.OK}
            taken = await received(consumer, 9500)
            assert set(await consumer.ack(*taken)) == {Settled.OK}
        ledger = await backend.control.ledger(KEY)
        assert (ledger.done, ledger.waiting, ledger.balanced) == (9500, 0, True)
        recounted(redis_server, redis_prefix)


async def test_the_largest_receive_after_a_change_to_fair_order(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """Law 1: after a change to fair order, no receive leaves tasks that are waiting for ever."""
    async with calm(redis_server, redis_prefix) as backend:
        await fill(backend, 10_000)
        await backend.control.configure(KEY, QueueSettings(order=Order.FAIR))
        async with backend.subscribe([KEY], "c") as consumer:
            first = (await consumer.receive(9000, 0)).deliveries
            rest = await received(consumer, 10_000 - len(first))
            assert len({delivery.task.id for delivery in (*first, *rest)}) == 10_000
            recounted(redis_server, redis_prefix)


async def test_the_largest_receive_with_ordering_keys(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """Law 4: with 9,500 ordering keys, one task of each is delivered, and each ack makes the next one available."""
    async with calm(redis_server, redis_prefix) as backend:
        for turn in range(2):
            tasks = [Task(key=KEY, id=f"t{turn}-{n}", ordering_key=f"k{n}") for n in range(9500)]
            await backend.publisher.publish(*tasks)
        async with backend.subscribe([KEY], "c") as consumer:
            for turn in range(2):
                taken = await received(consumer, 9500)
                assert {d.task.id for d in taken} == {f"t{turn}-{n}" for n in range(9500)}
                assert set(await consumer.ack(*taken)) == {Settled.OK}
        recounted(redis_server, redis_prefix)


@pytest.mark.parametrize("name", QUEUES)
async def test_bytes_per_script_call(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """U27: each script call passes and returns a bounded number of bytes, in the same order."""
    async with calm(redis_server, redis_prefix) as backend:
        await backend.control.configure(KEY, QUEUES[name])
        calls = Calls(backend, monkeypatch)
        ids = [f"t{n}" for n in range(90)]
        answers = await backend.publisher.publish(
            *(Task(key=KEY, id=i, payload=LARGE) for i in ids)
        )
        assert [answer.task_id for answer in answers] == ids
        again = await backend.publisher.publish(*(Task(key=KEY, id=i, payload=LARGE) for i in ids))
        assert {answer.status for answer in again} == {Published.DUPLICATE}
        async with backend.subscribe([KEY], "c") as consumer:
            taken = await received(consumer, 90)
            assert [delivery.task.id for delivery in taken] == ids
            receipts = [delivery.receipt for delivery in taken]
            assert [d and d.receipt for d in await consumer.adopt(*receipts)] == receipts
            assert set(await consumer.redeliver(*taken)) == {Settled.OK}
            taken = await received(consumer, 90)
            assert [delivery.task.id for delivery in taken] == ids
            assert set(await consumer.ack(*taken, results=[LARGE] * 90)) == {Settled.OK}
        assert await backend.control.results(KEY, *ids) == (LARGE,) * 90
        for script in ("publish", "receive", "adopt", "redeliver", "ack", "result"):
            assert len(calls.of(script)) > 1
            assert max(calls.of(script)) <= MOST, script
        recounted(redis_server, redis_prefix)


async def test_large_dead_letters(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of large dead letters is complete and in order, and is read and redriven by several script calls."""
    async with calm(redis_server, redis_prefix) as backend:
        calls = Calls(backend, monkeypatch)
        ids = [f"t{n}" for n in range(100)]
        await backend.publisher.publish(*(Task(key=KEY, id=i, payload=LARGE) for i in ids))
        async with backend.subscribe([KEY], "c") as consumer:
            for delivery in await received(consumer, 100):
                await consumer.dead_letter(delivery, "why")
            page = await backend.dead_letters.list(KEY, limit=100)
            assert [letter.task.id for letter in page] == ids
            assert await backend.dead_letters.redrive(KEY, *ids[:50]) == 50
            assert await backend.dead_letters.redrive(KEY) == 50
            assert len(await received(consumer, 100)) == 100
        assert max(calls.of("dead_letters")) <= MOST
        assert len(calls.of("redrive")) > 5
        recounted(redis_server, redis_prefix)


async def test_queues_take_turns_with_large_tasks(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """D11: if the tasks of one queue fill an answer, the next answer begins with the other queues."""
    async with calm(redis_server, redis_prefix) as backend:
        keys = ["a", "b", "c"]
        for key in keys:
            tasks = [Task(key=key, id=f"t{n}", payload=LARGE) for n in range(100)]
            await backend.publisher.publish(*tasks)
        async with backend.subscribe(keys, "c") as consumer:
            seen: list[set[str]] = []
            for _ in range(3):
                answer = await consumer.receive(300, 0)
                seen.append({delivery.task.key for delivery in answer.deliveries})
            assert set.union(*seen) == set(keys)


async def test_recovery_of_a_lost_answer_is_paged(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U27: after a lost answer, receipts are read in pages, and bodies only of the deliveries that were lost."""
    async with calm(redis_server, redis_prefix) as backend:
        ids = [f"t{n}" for n in range(400)]
        await backend.publisher.publish(*(Task(key=KEY, id=i, payload=LARGE) for i in ids))
        async with backend.subscribe([KEY], "c") as consumer:
            taken = await received(consumer, 300)
            with monkeypatch.context() as patch:
                patch.setattr(Receiver, "_note", lost)
                with pytest.raises(ZeroDivisionError):
                    await consumer.receive(50, 0)
            calls = Calls(backend, monkeypatch)
            consumer._receiver._mark_uncertain(*backend._context.scripts.partitions.names)
            found = await received(consumer, 400 - len(taken))
            assert [delivery.task.id for delivery in found] == ids[len(taken) :]
            assert set(await consumer.ack(*taken, *found)) == {Settled.OK}
        assert len(calls.of("pending")) > 1
        assert max(calls.of("pending")) < 250 * 200
        assert max(calls.of("adopt")) <= MOST
        assert sum(calls.of("adopt")) < 50 * 1.1 * LIMITS.payload


def lost(*_: Any, **__: Any) -> None:
    """Fail in the place of the method that reads the answer of a receive."""
    raise ZeroDivisionError


async def test_many_tenants_at_their_limit(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U27: one script call looks at few tenants that are at their limit; the receive finds the others."""
    async with calm(redis_server, redis_prefix) as backend:
        limits = QueueSettings(order=Order.FAIR, tenant_max_inflight=1)
        await backend.control.configure(KEY, limits)
        for turn in range(2):
            tasks = [Task(key=KEY, id=f"t{turn}-{n}", tenant=f"u{n}") for n in range(3000)]
            await backend.publisher.publish(*tasks)
        async with backend.subscribe([KEY], "c") as consumer:
            held = await received(consumer, 3000)
            await backend.control.configure(KEY, limits.model_copy(update={"version": 1}))
            await publish(backend, "last", tenant="other")
            before = commands_of(redis_server)
            calls = Calls(backend, monkeypatch)
            found = await consumer.receive(10, 5)
            assert [delivery.task.id for delivery in found.deliveries] == ["last"]
            number = len(calls.of("receive"))
            assert number > 3
            assert (commands_of(redis_server) - before) / number < 6 * 500 + 100
            assert set(await consumer.ack(*held, *found.deliveries)) == {Settled.OK}
            assert len(await received(consumer, 3000)) == 3000
        recounted(redis_server, redis_prefix)


def commands_of(server: RedisServer) -> int:
    """Return how many commands the server has executed so far, including those of scripts."""
    lines = server.call("INFO", "commandstats").decode().splitlines()
    return sum(
        int(line.partition("calls=")[2].partition(",")[0]) for line in lines if "calls=" in line
    )


async def test_a_fan_out_is_divided(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch for many bound queues is published by several script calls, in order and each task once per queue."""
    async with calm(redis_server, redis_prefix) as backend:
        bound = tuple(f"copy{n}" for n in range(100))
        await backend.control.configure("source", QueueSettings(bound_to=bound))
        calls = Calls(backend, monkeypatch)
        tasks = [
            Task(key="source" if n % 2 else "plain", id=f"t{n}", payload=b"%d" % n)
            for n in range(40)
        ]
        answers = await backend.publisher.publish(*tasks)
        assert [(a.key, a.task_id) for a in answers] == [(t.key, t.id) for t in tasks]
        assert {answer.status for answer in answers} == {Published.ACCEPTED}
        assert len(calls.of("publish")) >= 4
        assert {a.status for a in await backend.publisher.publish(*tasks)} == {Published.DUPLICATE}
        for key in (bound[0], bound[-1]):
            async with backend.subscribe([key], "c") as consumer:
                taken = await received(consumer, 20)
                assert [delivery.task.id for delivery in taken] == [
                    f"t{n}" for n in range(1, 40, 2)
                ]
        recounted(redis_server, redis_prefix)


async def test_every_script_at_its_largest_size(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """Each script executes a bounded number of commands and passes a bounded number of bytes, however much there is."""
    assert set(BOUNDS) == set(SCRIPTS)
    async with opened(redis_server.url, redis_prefix, lease=60.0, housekeeping=60.0) as backend:
        costs = await measure(backend, redis_server)
    assert set(costs) == set(BOUNDS)
    above = {
        name: cost
        for name, cost in costs.items()
        if cost.commands > BOUNDS[name].commands or cost.bytes > BOUNDS[name].bytes
    }
    assert not above, "these scripts exceed their bounds"


SIZES = st.sampled_from([1, 63, 64, 65, 250, 999, 1000, 1001, 2500])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "receive", "ack", "redeliver", "fair", "fifo"]),
        SIZES | st.just(LIMITS.call),
        st.sampled_from([2, 5000, 20_000]),
    ),
    min_size=3,
    max_size=9,
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
async def test_any_sequence_of_large_calls(
    redis_server: RedisServer, redis_prefix: str, steps: list[tuple[str, int, int]]
) -> None:
    """Law 1: after calls of any size, up to the largest, each task is delivered once, and all counters are right."""
    prefix = f"{redis_prefix}{abs(hash(tuple(steps)))}"
    async with calm(redis_server, prefix) as backend, backend.subscribe([KEY], "c") as consumer:
        number, held, done = 0, list[Delivery](), set[str]()
        for verb, size, body in steps:
            match verb:
                case "publish":
                    payload = b'"' + b"x" * body + b'"'
                    count = min(size, 20_000_000 // body, 2500)
                    await backend.publisher.publish(
                        *(
                            Task(key=KEY, id=f"t{n}", payload=payload, tenant=f"u{n % 7}")
                            for n in range(number, number + count)
                        )
                    )
                    number += count
                case "receive":
                    held += (await consumer.receive(size, 0)).deliveries
                case "ack":
                    some, held = held[:size], held[size:]
                    assert (
                        set(await consumer.ack(*some)) <= {Settled.OK} if len(some) != 1 else True
                    )
                    done |= {delivery.task.id for delivery in some}
                case "redeliver":
                    some, held = held[:size], held[size:]
                    await consumer.redeliver(*some)
                case _:
                    order = Order.FAIR if verb == "fair" else Order.FIFO
                    version = (await backend.control.settings(KEY)).version
                    await backend.control.configure(
                        KEY, QueueSettings(order=order, version=version)
                    )
            recounted(redis_server, prefix)
        held += await received(consumer, number - len(done) - len(held))
        ids = [delivery.task.id for delivery in held]
        assert len(ids) == len(set(ids))
        assert done | set(ids) == {f"t{n}" for n in range(number)}
        await consumer.ack(*held)
        recounted(redis_server, prefix)


async def test_the_statistics_of_many_queues(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U20: statistics and settings that are asked for at the same time share script calls, of at most 50 queues."""
    async with calm(redis_server, redis_prefix) as backend:
        keys = [f"k{n:03}" for n in range(120)]
        for number, key in enumerate(keys[:60]):
            tasks = [Task(key=key, id=f"t{n}") for n in range(1 + number % 3)]
            await backend.publisher.publish(*tasks)
        calls, control = Calls(backend, monkeypatch), backend.control
        found, rules = await asyncio.gather(
            gather_all([*map(control.stats, keys)]), gather_all([*map(control.settings, keys)])
        )
        expected = [1 + n % 3 if n < 60 else 0 for n in range(120)]
        assert [(one.key, one.ledger.waiting) for one in found] == [
            *zip(keys, expected, strict=True)
        ]
        assert [one.oldest_waiting is not None for one in found] == [n > 0 for n in expected]
        assert list(rules) == [QueueSettings()] * 120
        assert len(calls.of("stats")) == 1 + 3
        for read in (Queue(backend).ledger, partial(read_queues, backend, [])):
            calls = Calls(backend, monkeypatch)
            assert await read()
            assert (
                len(calls.of("stats")) == 3
            )  # of the 60 queues with tasks: one, then 50, then the rest
