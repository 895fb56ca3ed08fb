"""Every script at its largest size, measured by a meter: commands, bytes and milliseconds of each script call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from taskqueue_core.after import After, TaskRef
from taskqueue_core.authoring.waits import PARENTS_OF_COPIES
from taskqueue_core.capabilities import (
    Endpoint,
    Order,
    QueueSettings,
    Seen,
)
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import State, Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_redis import RedisBackend
from tests.redis.backends import until
from tests.redis.carrying import carry
from tests.redis.largest_records import LARGE, audit, received, schedules, streams
from tests.redis.meter import SCRIPTS, Meter, size_of
from tests.redis.script_costs import Cost
from tests.redis.servers import RedisServer

__all__ = ["LARGE", "SCRIPTS", "measure", "received", "size_of"]

LONG = "x" * LIMITS.traceback
"""the longest traceback"""
_AT_ONCE = 1000
_HOUR = 3600.0


def _tasks(key: str, number: int, *, tenants: int = 1, start: int = 0, **fields: Any) -> list[Task]:
    return [
        Task(key=key, id=f"t{n}", tenant=f"u{n % tenants}" if tenants > 1 else None, **fields)
        for n in range(start, start + number)
    ]


async def _lives(backend: RedisBackend, key: str, tasks: list[Task], result: bytes | None) -> None:
    """Publish tasks, and let each be released, adopted and acked."""
    await backend.publisher.publish(*tasks)
    await backend.publisher.publish(*tasks)
    async with backend.subscribe([key], "c") as consumer:
        taken = await received(consumer, len(tasks))
        await consumer.redeliver(*taken)
        taken = await received(consumer, len(tasks))
        consumer._receiver.mark_all_uncertain()
        await consumer.receive(1, 0)
        async with backend.subscribe([key], "c") as heir:
            adopted = await heir.adopt(*(delivery.receipt for delivery in taken))
            assert all(adopted)
        taken = await received(consumer, len(tasks))
        await backend.control.statuses(key, *(task.id for task in tasks[:_AT_ONCE]))
        await consumer.ack(*taken, results=[result] * len(taken))
    await backend.control.results(key, *(task.id for task in tasks[:_AT_ONCE]))
    await backend.control.statuses(key, *(task.id for task in tasks[:_AT_ONCE]))


async def _plain(backend: RedisBackend) -> None:
    await backend.control.configure("plain", QueueSettings(journal=True))
    await _lives(backend, "plain", _tasks("plain", 4000), b"1")


async def _large(backend: RedisBackend) -> None:
    await _lives(backend, "large", _tasks("large", 100, payload=LARGE), LARGE)


async def _tenants(backend: RedisBackend) -> None:
    settings = QueueSettings(
        order=Order.FAIR, tenant_max_inflight=10, max_processing_time=_HOUR, journal=True
    )
    await backend.control.configure("tenants", settings)
    await _lives(backend, "tenants", _tasks("tenants", 3000, tenants=1000), b"1")


async def _ordered(backend: RedisBackend) -> None:
    for turn in range(2):
        tasks = [Task(key="ordered", id=f"{turn}-{n}", ordering_key=f"k{n}") for n in range(1000)]
        await backend.publisher.publish(*tasks)
    async with backend.subscribe(["ordered"], "c") as consumer:
        for _ in range(2):
            await consumer.ack(*await received(consumer, 1000))


async def _expired_and_due(backend: RedisBackend) -> None:
    soon = backend.now() + 1.5
    for key, number in (("dates", 1500), ("other", 600), ("third", 600)):
        await backend.publisher.publish(*_tasks(key, number, deadline=soon))
        later = _tasks(key, number, start=number, not_before=soon)
        await backend.publisher.publish(*later)
    await until(lambda: backend.now() > soon, "the tasks are due, or expired")
    async with backend.subscribe(["dates"], "c") as consumer:
        await received(consumer, 1000)
        scripts = backend._context.scripts
        await scripts.run("promote", scripts.partitions.names[0], 500)
        await backend.control.maintain()


async def _dead(backend: RedisBackend) -> None:
    for key, payload, number in (("dead", b"1", 1000), ("heavy", LARGE, 40)):
        await backend.publisher.publish(*_tasks(key, number, payload=payload))
        async with backend.subscribe([key], "c") as consumer:
            for verb in (backend.dead_letters.redrive, backend.dead_letters.discard):
                for delivery in await received(consumer, number):
                    await consumer.dead_letter(delivery, "why", "x" * LIMITS.text, LONG)
                await backend.dead_letters.list(key, limit=LIMITS.batch)
                await verb(key)


async def _listed(backend: RedisBackend) -> None:
    """List tasks in each state, with long errors, a filter that drops all, and each order."""
    settings = QueueSettings(index=("t",), keep_ended=_HOUR)
    await backend.control.configure("listed", settings)
    tags = tuple(f"t:{n}{'x' * 90}" for n in range(LIMITS.tags))
    await backend.publisher.publish(
        *_tasks("listed", 4000, tags=tags, tenants=10),
        *_tasks("listed", 1000, start=4000, tags=tags, not_before=backend.now() + _HOUR),
    )
    async with backend.subscribe(["listed"], "c") as consumer:
        taken = await received(consumer, 3000)
        await consumer.ack(*taken[:1500])
        for delivery in taken[1500:1800]:
            await consumer.dead_letter(delivery, "why", "x" * LIMITS.text, LONG)
        for state in (*State, None):
            for newest in (False, True):
                for tenant in (None, "nobody"):
                    await backend.listing.tasks(
                        "listed", state=state, tag=None if state else tags[0], tenant=tenant,
                        newest=newest, limit=LIMITS.batch,
                    )  # fmt: skip
        for newest in (False, True):
            await backend.listing.tasks("listed", state=State.IN_FLIGHT, worker="c", newest=newest)
        await backend.listing.task("listed", taken[1500].task.id)
        for tag in tags[:2]:
            await backend.listing.erase("listed", tag, limit=LIMITS.batch)
    await backend.publisher.publish(*_tasks("broad", 40, payload=LARGE))
    await backend.listing.tasks("broad", state=State.WAITING)
    await backend.listing.task("broad", "t0")


async def _fan_out(backend: RedisBackend) -> None:
    bound = tuple(f"copy{n}" for n in range(100))
    await backend.control.configure("source", QueueSettings(bound_to=bound))
    parents = tuple(TaskRef("copy0", f"t{n}") for n in range(LIMITS.parents))
    most = parents[: PARENTS_OF_COPIES // len(bound)]
    await backend.publisher.publish(
        *(*_tasks("source", 250), Task(key="source", id="refused", after=After(tasks=parents))),
        *(Task(key="source", id=f"w{n}", after=After(tasks=most)) for n in range(9)),
    )


async def _unique(backend: RedisBackend) -> None:
    """Replace many tasks, and publish many whose keys have many members."""
    settings = QueueSettings(order=Order.FAIR, tenant_capacity=100_000, journal=True)
    await backend.control.configure("unique", settings)
    for turn in range(3):
        soon = backend.now() + _HOUR
        tasks = [
            Task(
                key="unique", id=f"{turn}-{n}", tenant=f"u{n}", deadline=soon, ordering_key=f"e{n}-{turn}",
                unique=UniqueKey(key=f"k{n}", on_conflict="replace"),
            )
            for n in range(1000)
        ]  # fmt: skip
        await backend.publisher.publish(*tasks)
    same = [
        Task(key="shared", id=f"{n}", unique=UniqueKey(key="k", on_conflict="replace"))
        for n in range(500)
    ]
    async with backend.subscribe(["shared"], "c") as consumer:
        for task in same[:200]:
            await backend.publisher.publish(task)
            await received(consumer, 1)
        await backend.publisher.publish(*same)
        await backend.control.maintain()


async def _limited(backend: RedisBackend) -> None:
    settings = QueueSettings(order=Order.FAIR, tenant_max_inflight=1)
    await backend.control.configure("limited", settings)
    await backend.publisher.publish(*_tasks("limited", 6000, tenants=3000))
    async with backend.subscribe(["limited"], "c") as consumer:
        await received(consumer, 3000)
        await backend.control.configure("limited", settings.model_copy(update={"version": 1}))
        await consumer.receive(1000, 0)


async def _paused(backend: RedisBackend) -> None:
    """Half of 2,000 tenants are paused."""
    names = tuple(f"u{n}" for n in range(1000))
    await backend.control.configure("paused", QueueSettings(order=Order.FAIR))
    await backend.publisher.publish(*_tasks("paused", 2000, tenants=2000))
    settings = QueueSettings(
        version=1, order=Order.FAIR, weights=dict.fromkeys(names, 2), paused_tenants=names
    )
    await backend.control.configure("paused", settings)
    async with backend.subscribe(["paused"], "c") as consumer:
        taken = await received(consumer, 1000)
        assert not {delivery.task.tenant for delivery in taken} & set(names)
        await backend.control.configure("paused", settings.model_copy(update={"version": 2}))
        while (answer := await consumer.receive(LIMITS.call, 0)).again:
            assert not answer.deliveries
        assert not answer.deliveries
        open_to_all = settings.model_copy(update={"version": 3, "paused_tenants": ()})
        await backend.control.configure("paused", open_to_all)
        await received(consumer, 1000)


async def _purged(backend: RedisBackend) -> None:
    await backend.publisher.publish(*_tasks("purged", 2000, tenants=1000))
    settings = QueueSettings(order=Order.FAIR, tenant_max_inflight=1)
    await backend.control.configure("purged", settings)
    await backend.control.stats("purged")
    await backend.control.purge("purged")
    await backend.control.delete("purged")


async def _returned(backend: RedisBackend) -> None:
    await backend.publisher.publish(*_tasks("returned", 2000))
    async with backend.subscribe(["returned"], "c") as consumer:
        await received(consumer, 2000)


async def _single(backend: RedisBackend) -> None:
    await backend.publisher.publish(*_tasks("single", 3, payload=LARGE))
    async with backend.subscribe(["single"], "c") as consumer:
        one, two, three = await received(consumer, 3)
        await backend.control.progress(one, "x" * LIMITS.text)
        await backend.control.cancel("single", one.task.id)
        await backend.publisher.publish(*_tasks("single", 1, start=9, payload=LARGE))
        (late,) = _tasks("single", 1, start=9)
        await backend.control.reschedule("single", late.id, backend.now() + _HOUR)
        for _ in range(20):
            await backend.publisher.schedule_retry(
                two.task, backend.now() + _HOUR, error="x" * LIMITS.text, traceback=LONG
            )
        await backend.publisher.schedule_retry(three.task, backend.now(), settles=three)


async def _related(backend: RedisBackend) -> None:
    parents = tuple(TaskRef("parents", f"t{n}") for n in range(LIMITS.parents))
    batch = TaskRef("children", "batch")
    await backend.publisher.publish(Task(key=batch.key, id=batch.task_id, batch=batch))
    await backend.publisher.publish(*_tasks("parents", LIMITS.parents, batch=batch))
    one = After(tasks=parents[:1], inputs=(0,))
    await backend.publisher.publish(
        *(Task(key="children", id=f"m{n}", after=After(tasks=parents)) for n in range(5)),
        *_tasks("children", 1000, after=one),
        *(Task(key="heavy", id=f"h{n}", payload=LARGE, after=one) for n in range(40)),
        *(
            Task(key="away", id=f"a{n}", after=After(tasks=(TaskRef("none", "n"),)))
            for n in range(300)
        ),
        *(Task(key="each", id=f"e{n}", after=After(tasks=(parents[n],))) for n in range(1000)),
        *(
            Task(
                key="chain",
                id=f"c{n}",
                after=After(tasks=(TaskRef("chain", f"c{n - 1}"),)) if n else None,
            )
            for n in range(1000)
        ),
    )
    async with backend.subscribe(["parents"], "c") as consumer:
        taken = await received(consumer, LIMITS.parents)
        await consumer.ack(*taken, results=[LARGE] + [None] * (len(taken) - 1))
    await backend.control.cancel("chain", "c0")
    await backend.dependencies.close(batch)
    await carry(backend.dependencies)
    assert (await backend.control.ledger("chain")).cancelled == 1000
    assert (await backend.control.ledger("each")).waiting == 1000
    assert (await backend.control.ledger("children")).waiting == 1005
    assert (await backend.control.ledger("children")).done == 1


async def _many_queues(backend: RedisBackend) -> None:
    keys = [f"queue{n}" for n in range(LIMITS.keys)]
    await backend.publisher.publish(*(Task(key=key, id="t") for key in keys))
    async with backend.subscribe(keys, "c") as consumer:
        await received(consumer, LIMITS.keys)
        scripts = backend._context.scripts
        await scripts.run("beat", scripts.partitions.names[0], consumer.token)
        async with AsyncExitStack() as stack:
            for _ in range(200):
                await stack.enter_async_context(backend.subscribe(keys[:50], "d"))
            assert len(await backend.control.workers()) == 2
            assert len(await backend.control.queues()) > LIMITS.keys
        await backend.control.maintain()
    assert await scripts.run("repair", scripts.partitions.names[0], "0") != b"0"
    scripts.promises_checked = False
    await scripts.check_promises()
    await scripts.run("health", scripts.partitions.names[0])


async def _slots(backend: RedisBackend) -> None:
    pool = backend.slots
    servers = [f"server{n}" for n in range(100)]
    for server in servers:
        endpoint = Endpoint(model="m", server=server, url=f"http://{server}", slots=LIMITS.batch)
        await pool.register(endpoint)
        await pool.reconcile("m", server, Seen(active=0), settled=0.0)
    await pool.configure("m", b'"' + b"x" * (LIMITS.document - 2) + b'"')
    await pool.documents()
    leases = list(await pool.acquire("m", "h", ttl=_HOUR, limit=LIMITS.batch))
    jobs = [(lease, f"job{n}") for n, lease in enumerate(leases)]
    assigned = [lease for lease in await pool.assign(*jobs, ttl=_HOUR) if lease]
    renewed = [lease for lease in await pool.renew(*assigned, ttl=_HOUR) if lease]
    await pool.leave("m", "job0", renewed[0].token, LARGE)
    await pool.leave("m", "job0", "stale", LARGE)
    await pool.late("m", "job0")
    await pool.inspect()
    await pool.rest("m", "server0", 1.0)
    await pool.reconcile("m", renewed[0].server, Seen(active=0, jobs=frozenset()), settled=0.0)
    await pool.release(*renewed)
    await pool.acquire("m", "h", ttl=0.001, limit=LIMITS.batch)
    await asyncio.sleep(0.01)
    await pool.leave("m", "job0", "stale", b"1")
    await pool._restore(renewed[:1], _HOUR)


SCENARIOS: tuple[Callable[[RedisBackend], Awaitable[None]], ...] = (
    _plain, _large, _tenants, _ordered, _expired_and_due, _dead, _fan_out, _limited, _paused, _purged, _returned,
    _single, _related, _many_queues, _slots, schedules, audit, streams, _unique, _listed,
)  # fmt: skip


async def measure(backend: RedisBackend, server: RedisServer) -> dict[str, Cost]:
    """Run every script at its largest size, and return the maximum of each figure by script."""
    meter = Meter(backend, server)
    try:
        for scenario in SCENARIOS:
            await scenario(backend)
    finally:
        meter.close()
    return meter.costs
