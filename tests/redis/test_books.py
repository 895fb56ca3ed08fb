"""Counters and indexes of a queue agree with its Redis data structures after any random sequence of operations."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable

import pytest

from taskqueue_conformance.suites.streams import new
from taskqueue_core.after import After, OnDead, TaskRef, When
from taskqueue_core.capabilities import Fire, Order, Run, Skip, StoredSchedule
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import InvalidInput, LeaseLost, SettingsConflict
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Delivery, Task
from taskqueue_core.uniqueness import Debounce, UniqueKey
from taskqueue_redis import RedisBackend
from taskqueue_redis.subscription import RedisSubscription
from tests.redis.backends import opened
from tests.redis.carrying import carry_some
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer

KEYS = ("alpha", "beta", "gamma")
STEPS = 400
IDS = 150


_ORDERS: tuple[dict[str, object], ...] = (
    {
        "order": Order.FIFO,
        "weights": {},
        "paused_tenants": (),
        "tenant_capacity": None,
        "tenant_max_inflight": None,
        "tenant_rate_limit": None,
    },
    {"order": Order.FAIR, "weights": {"a": 3}, "paused_tenants": ("b",)},
    {"order": Order.FAIR, "tenant_capacity": 4, "tenant_max_inflight": 2},
    {"order": Order.FAIR, "tenant_rate_limit": RateLimit(max_tokens=3, interval=2)},
)


class Workload:
    """A random sequence of all operations that a backend supports."""

    def __init__(self, backend: RedisBackend, clock: ManualClock, chance: random.Random) -> None:
        self.backend = backend
        self.clock = clock
        self.chance = chance
        self.orders = True
        """whether new tasks may have ordering keys at the moment"""
        self.waits = True
        """whether new tasks may wait for others"""
        self.held: list[Delivery] = []
        self.consumers: list[RedisSubscription] = []
        self.silent: list[str] = []
        self.verbs: list[Callable[[], Awaitable[object]]] = [
            self.publish, self.publish, self.receive, self.receive, self.ack, self.ack, self.redeliver, self.lose,
            self.bury, self.retry, self.retry_by_id, self.cancel, self.purge, self.redrive, self.maintain, self.wait,
            self.leave, self.fall_silent, self.adopt, self.progress, self.limit, self.reschedule,
            self.carry, self.close, self.stream, self.erase, self.put, self.fire, self.fire, self.remove,
        ]  # fmt: skip

    def key(self) -> str:
        """Return a random queue key."""
        return self.chance.choice(KEYS)

    def some(self) -> list[Delivery]:
        """Return random deliveries, some of which may have been settled before."""
        self.chance.shuffle(self.held)
        number = self.chance.randint(1, 4)
        chosen = self.held[:number]
        if self.chance.random() < 0.8:
            del self.held[:number]
        return chosen

    async def consumer(self) -> RedisSubscription:
        """Return a random consumer, or a new one if there are few."""
        if len(self.consumers) < 3:
            self.consumers.append(self.backend.subscribe(KEYS, self.chance.choice("xy")))
        return self.chance.choice(self.consumers)

    async def publish(self) -> None:
        """Publish a few tasks."""
        tasks = [self.task(self.key()) for _ in range(self.chance.randint(1, 8))]
        await self.backend.publisher.publish(*tasks)

    def task(self, key: str) -> Task:
        """Return a random task: its id may be known, it may be scheduled, have a deadline, or wait for others."""
        now, chance = self.clock.now(), self.chance
        later = now + chance.uniform(0, 5) if chance.random() < 0.3 else None
        end = now + chance.uniform(1, 9) if chance.random() < 0.3 else None
        entity = chance.choice((None, None, "e", "f")) if self.orders else None
        number, content = chance.randrange(IDS), chance.choice((None, None, b"1", b"2"))
        return Task(
            key=key, id=str(number), priority=chance.choice((0, 5, 5, 9)),
            not_before=later, deadline=end, tenant=chance.choice((None, "a", "b", "c")),
            ordering_key=entity, unique=self.unique(timed=later is not None or entity is not None),
            after=self.after(number), batch=self.batch(), content_digest=content and 16 * content,
            payload=str(chance.random()).encode() if content else b"null",
            tags=("user:1",) if chance.random() < 0.1 else (),
        )  # fmt: skip

    def unique(self, *, timed: bool = True) -> UniqueKey | None:
        """Return a random unique key, or none; with a debounce only if the task has no time or order of its own."""
        chance = self.chance
        if chance.random() < 0.6:
            return None
        if not timed and chance.random() < 0.3:
            wait = Debounce(chance.uniform(0.5, 4), chance.choice((None, 6.0)))
            return UniqueKey(key=chance.choice("abc"), on_conflict="replace", debounce=wait)
        return UniqueKey(
            key=chance.choice("abc"),
            until=chance.choice(("ended", "started")),
            period=chance.choice((None, None, 2.0, 400.0)),
            on_conflict=chance.choice(("keep", "replace", "replace", "refuse")),
        )

    def after(self, number: int) -> After | None:
        """Return what a new task waits for: tasks with lower numbers, which need not exist."""
        chance = self.chance
        if not self.waits or not number or chance.random() < 0.6:
            return None
        names = [str(chance.randrange(number)) for _ in range(chance.choice((1, 1, 3)))]
        refs = {TaskRef(self.key(), name) for name in names}
        inputs = tuple(range(len(refs))) if chance.random() < 0.5 else ()
        when: When = chance.choice(("done", "done", "ended", "failed"))
        on_dead: OnDead = chance.choice(("hold", "cancel"))
        return After(tasks=tuple(sorted(refs, key=str)), when=when, on_dead=on_dead, inputs=inputs)

    def batch(self) -> TaskRef | None:
        """Return the batch of a new task, which may be closed, and need not exist."""
        chance = self.chance
        return (
            TaskRef("alpha", f"b{chance.randrange(3)}")
            if self.waits and chance.random() < 0.1
            else None
        )

    async def put(self) -> None:
        """Store a schedule, or change, pause or resume one."""
        now, chance = self.clock.now(), self.chance
        schedule = StoredSchedule(
            key=self.key(), name=chance.choice("st"), spec=chance.choice((b"1", b"2")),
            next_at=chance.choice((None, now - 3, now, now + 1)),
        )  # fmt: skip
        with contextlib.suppress(SettingsConflict):
            await self.backend.schedules.put(
                schedule,
                version=chance.choice((None, None, None, 0, 3)),
                keep_next=chance.random() < 0.3,
            )

    async def fire(self) -> None:
        """Fire schedules that are due, and some that are not; some twice, some by a plan that is stale."""
        chance, schedules = self.chance, self.backend.schedules
        due = await schedules.due(chance.randint(1, 4))
        found = [*due.schedules, *await schedules.list(limit=1)]
        fires = [self.planned(each, due.now) for each in found]
        await schedules.fire(*fires, *fires[: chance.randint(0, 1)])

    def planned(self, stored: StoredSchedule, now: float) -> Fire:
        """Return a random plan for a schedule."""
        chance = self.chance
        at = now if stored.next_at is None else stored.next_at
        runs = (Run(at + n, self.task(stored.key)) for n in range(chance.choice((0, 1, 1, 1, 3))))
        return Fire(
            key=stored.key,
            name=stored.name,
            version=stored.version - (chance.random() < 0.1),
            planned_for=chance.choice((at, at, at, at, None, at + 1)),
            runs=tuple(runs),
            skipped=(Skip(at - 2, "late", 2),) if chance.random() < 0.3 else (),
            next_at=chance.choice((None, at, now + 1, now + 2)),
        )

    async def remove(self) -> None:
        """Delete a schedule, which may be unknown; rarely."""
        if self.chance.random() < 0.3:
            await self.backend.schedules.delete(self.key(), self.chance.choice("st"))

    async def stream(self) -> None:
        """Append events to some deliveries, some of which have ended, and read those of a task."""
        items = [new(delivery, 1, 2) for delivery in self.held[:3]]
        await self.backend.streams.append(*items)
        name = str(self.chance.randrange(IDS))
        await self.backend.streams.events(self.key(), name, after="1-2", wait=0)

    async def carry(self) -> None:
        """Carry some lines, in any order, some of them twice, and confirm some of them."""
        lines = self.backend.dependencies
        page = list(await lines.lines(self.chance.randint(1, 20)))
        self.chance.shuffle(page)
        await carry_some(lines, page)
        if self.chance.random() < 0.8:
            await lines.confirm(*page)

    async def close(self) -> None:
        """Begin a batch, or close it."""
        batch = self.batch()
        if batch is not None:
            await self.backend.publisher.publish(Task(key=batch.key, id=batch.task_id, batch=batch))
            if self.chance.random() < 0.2:
                await self.backend.dependencies.close(batch)

    async def receive(self) -> None:
        """Receive a few tasks."""
        received = await (await self.consumer()).receive(self.chance.randint(1, 10), 0)
        self.held += received.deliveries

    async def ack(self) -> None:
        """Ack a few deliveries, one with a result."""
        if some := self.some():
            results = [b"1", *[None] * (len(some) - 1)]
            await (await self.consumer()).ack(*some, results=results)

    async def redeliver(self) -> None:
        """Release a few deliveries."""
        if some := self.some():
            await (await self.consumer()).redeliver(*some)

    async def lose(self) -> None:
        """Report a few deliveries as lost."""
        if some := self.some():
            await (await self.consumer()).redeliver(*some, lost=True)

    async def bury(self) -> None:
        """Dead-letter one delivery."""
        if some := self.some():
            await (await self.consumer()).dead_letter(some[0], "why", "error")

    async def retry(self) -> None:
        """Schedule a retry of one delivery."""
        for delivery in self.some()[:1]:
            at = self.clock.now() + self.chance.uniform(-1, 4)
            free = self.chance.random() < 0.3
            await self.backend.publisher.schedule_retry(
                delivery.task, at, settles=delivery, free=free
            )

    async def retry_by_id(self) -> None:
        """Schedule a retry of a random task, whatever its state."""
        task = Task(key=self.key(), id=str(self.chance.randrange(IDS)), unique=self.unique())
        await self.backend.publisher.schedule_retry(task, self.clock.now() + 1, error="e")

    async def reschedule(self) -> None:
        """Give a random task another time, whatever its state."""
        at = self.clock.now() + self.chance.uniform(-1, 4)
        await self.backend.control.reschedule(self.key(), str(self.chance.randrange(IDS)), at)

    async def cancel(self) -> None:
        """Cancel a random task, whatever its state."""
        await self.backend.control.cancel(self.key(), str(self.chance.randrange(IDS)))

    async def purge(self) -> None:
        """Purge a queue, but only in about one of ten calls."""
        if self.chance.random() < 0.1:
            await self.backend.control.purge(self.key())

    async def erase(self) -> None:
        """Erase a few tasks with a tag, whatever their states, if the queue indexes tags."""
        with contextlib.suppress(InvalidInput):
            await self.backend.listing.erase(self.key(), "user:1", limit=self.chance.randint(1, 5))

    async def redrive(self) -> None:
        """Redrive or discard dead letters of a queue."""
        letters = self.backend.dead_letters
        move = letters.redrive if self.chance.random() < 0.7 else letters.discard
        await move(self.key(), *(str(n) for n in range(self.chance.choice((0, 100)))))

    async def maintain(self) -> None:
        """Run a maintenance pass."""
        await self.backend.control.maintain()

    async def wait(self) -> None:
        """Advance the clock by up to two seconds."""
        await self.clock.advance(self.chance.uniform(0, 2))

    async def limit(self) -> None:
        """Change the limits of a queue at random."""
        key, chance = self.key(), self.chance
        self.orders = chance.random() < 0.6
        limits: dict[str, object] = {
            "capacity": chance.choice((None, None, 10)),
            "max_inflight": chance.choice((None, None, 6)),
            "rate_limit": chance.choice((None, None, RateLimit(max_tokens=9, interval=2))),
            "paused": chance.random() < 0.1,
            "intake_paused": chance.random() < 0.1,
            "max_processing_time": chance.choice((None, 3.0)),
            "floor_share": chance.choice((0, 0.2)),
            "dedupe_window": chance.choice((300.0, 3.0)),
            "result_ttl": chance.choice((3600.0, 4.0, 2.0)),
            "index": chance.choice((("user",), ("user",), ())),
            **_ORDERS[0],
            **chance.choice(_ORDERS),
        }
        settings = await self.backend.control.settings(key)
        await self.backend.control.configure(key, settings.model_copy(update=limits))

    async def leave(self) -> None:
        """Close a consumer."""
        if self.consumers:
            await self.consumers.pop().close()

    async def fall_silent(self) -> None:
        """Simulate the death of a consumer, so that its lease has already expired."""
        if self.consumers:
            token = self.consumers.pop(0).token
            self.silent.append(token)
            self.backend._context.heartbeat.remove(token)
            await self.forget_beats()

    async def forget_beats(self) -> None:
        """Make the silent consumers' leases expire again, because a heartbeat may have arrived late."""
        name, command = (
            self.backend._context.scripts.partitions.names[0],
            self.backend._context.client.command,
        )
        for token in self.silent:
            await command(name, "ZADD", f"{name}:alive", "XX", 1, token)
        await command(name, "HSET", f"{name}:meta", "armed", 1)

    async def adopt(self) -> None:
        """Let another consumer adopt a few deliveries."""
        await (await self.consumer()).adopt(*(d.receipt for d in self.some()))

    async def progress(self) -> None:
        """Report progress of one delivery."""
        for delivery in self.some()[:1]:
            self.held.append(delivery)
            await self.backend.control.progress(delivery, 0.5)


@pytest.mark.oldest
@pytest.mark.parametrize("seed", [1, 2])
async def test_after_any_workload(each_redis: RedisServer, redis_prefix: str, seed: int) -> None:
    """A24, E6, BUG-D4, A14, laws 1 and 10, rule 10: after random operations the counters equal a full recount."""
    clock, chance = ManualClock(1_700_000_000.0), random.Random(seed)
    async with opened(each_redis.url, redis_prefix, clock=clock) as backend:
        workload = Workload(backend, clock, chance)
        for step in range(4 * STEPS):
            verb = chance.choice(workload.verbs)
            with contextlib.suppress(LeaseLost):
                await verb()
            if step % 10 == 0:
                books = recounted(each_redis, redis_prefix)
                if step >= STEPS and not missing(books):
                    break
        for consumer in workload.consumers:
            await consumer.close()
        # Repeated, because a pause of a busy machine grants the silent consumers another lease.
        for _ in range(50):
            await workload.forget_beats()
            await backend.control.maintain()
            ledgers = [await backend.control.ledger(key) for key in KEYS]
            if not any(ledger.in_flight for ledger in ledgers):
                break
        books = recounted(each_redis, redis_prefix)
        for key in KEYS:
            ledger = await backend.control.ledger(key)
            assert ledger.balanced
            assert ledger.in_flight == 0
            assert ledger.published == books[key]["published"] > 0
        assert missing(books) == set()


def missing(books: dict[str, dict[str, int]]) -> set[str]:
    """Return the final states that no task has reached yet."""
    ends = ("done", "dead", "expired", "cancelled", "discarded")
    return {end for end in ends if not any(book[end] for book in books.values())}
