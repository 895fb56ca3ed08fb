"""Single tasks under faults: retries, repeated ids, redrives, cancels and long work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_lettering_of, dead_letters_of
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Published, State, Task, TaskStatus
from tests.chaos.cases import CHAOS, LEASE, LONG, SEEDS, passed, small
from tests.chaos.world import World

pytestmark = LONG

each_seed = pytest.mark.parametrize("seed", SEEDS)
KEY = "alpha"
_AGAIN = 0.03
_LATE = 1.0
"""maximum seconds by which a typical retry may be late on a busy machine"""
Answer = TypeVar("Answer")


async def _answered(call: Callable[..., Awaitable[Answer]], *words: Any, **more: Any) -> Answer:
    """Repeat a call until it is answered."""
    while True:
        try:
            return await call(*words, **more)
        except (BackendUnavailable, PublishUnconfirmed):
            await asyncio.sleep(_AGAIN)


async def _statuses(world: World, count: int) -> list[TaskStatus]:
    told = await world.control.statuses(KEY, *(f"t{n}" for n in range(count)))
    return [one for one in told if one is not None]


async def _behind_links(world: World, count: int) -> list[Backend]:
    """Return backends that each use their own breakable link."""
    links = [await world.link("consumer", number) for number in range(count)]
    return [world.open_backend(link.address[1]) for link in links]


@pytest.mark.parametrize("seconds", [2.0, pytest.param(120.0, marks=CHAOS)])
async def test_waiting_for_room_burns_no_attempt(folder: Path, seconds: float) -> None:
    """FIX-C3, fault F6: while tasks wait for the one place in flight, their attempts do not grow, whatever fails."""
    shape = small(tasks=0, consumers=0, keys=(KEY,), limits={KEY: {"max_inflight": 1}})
    async with World(folder, shape) as world:
        await world.begin()
        async with world.subscribe("slow") as slow:
            await world.backend.publisher.publish(Task(key=KEY, id="first"))
            (first,) = (await world.receive(slow, 1)).deliveries
            await world.backend.publisher.publish(*(Task(key=KEY, id=f"t{n}") for n in range(50)))
            for number in range(2):
                await world.start("consumer", number)
            await asyncio.sleep(seconds / 2)
            await world.inflict("kill", "redis", 0, 0.2)
            await world.inflict("kill", "consumer", 0)
            await asyncio.sleep(seconds / 2)
            waiting = await _statuses(world, 50)
            assert {(one.state, one.attempt, one.losses) for one in waiting} == {
                (State.WAITING, 1, 0)
            }
            await _answered(slow.ack, first)


async def test_retries_come_in_their_band(folder: Path) -> None:
    """Fault F7: five attempts come with delays within the policy's range, although Redis is killed in between."""
    policy, count, failures = RetryPolicy(base=0.1, cap=0.4, jitter=0.2), 40, 4
    chance = random.Random(7)
    dues: dict[tuple[str, int], float] = {}
    late: list[float] = []
    async with World(folder, small(tasks=0, consumers=0, keys=(KEY,))) as world:
        await world.begin()
        await world.backend.publisher.publish(*(Task(key=KEY, id=f"t{n}") for n in range(count)))
        done = 0
        killed = False
        async with world.subscribe("c") as consumer:
            while done < count:
                received = await _answered(world.receive, consumer, 10)
                for delivery in received.deliveries:
                    name, attempt = delivery.task.id, delivery.attempt
                    if attempt > 1:
                        late.append(delivery.delivered_at - dues[name, attempt])
                    if attempt > failures:
                        await _answered(consumer.ack, delivery)
                        done += 1
                        continue
                    wait = policy.delay(attempt, chance.random)
                    assert 0.8 * 0.1 * 2 ** (attempt - 1) <= wait or wait >= 0.8 * policy.cap
                    due = dues[name, attempt + 1] = world.backend.now() + wait
                    await _answered(
                        world.backend.publisher.schedule_retry,
                        delivery.task,
                        due,
                        error="on purpose",
                        settles=delivery,
                    )
                if len(late) > count and not killed:
                    killed = True
                    await world.inflict("kill", "redis", 0, 0.05)
        statuses = await _statuses(world, count)
    assert len(late) == failures * count
    assert min(late) >= -0.002
    assert sorted(late)[len(late) // 2] <= _LATE
    assert {(one.state, one.attempt) for one in statuses} == {(State.DONE, failures + 1)}


@each_seed
async def test_one_id_from_many_sides(folder: Path, seed: int) -> None:
    """Fault F18: three publishers send the same ids while answers get lost; one copy of each is stored.

    Publishing an id with another payload is a conflict, before and after the task ends.
    """
    count = 120
    async with World(folder, small(tasks=0, consumers=0, keys=(KEY,)), seed=seed) as world:
        await world.begin()
        backends = await _behind_links(world, 3)
        told: dict[str, list[tuple[bytes, Published]]] = {f"t{n}": [] for n in range(count)}

        async def send(number: int, backend: Backend) -> None:
            chance = random.Random(f"{seed} {number}")
            for n in chance.sample(range(count), count):
                task = Task(key=KEY, id=f"t{n}", payload=b'"other"' if number == 2 else b'"one"')
                if n % 10 == 0:
                    (await world.link("consumer", number)).lose_replies(1, after=b"EVALSHA")
                (answer,) = await _answered(backend.publisher.publish, task)
                told[task.id].append((task.payload, answer.status))

        await asyncio.gather(*(send(number, one) for number, one in enumerate(backends)))
        ledger = await world.control.ledger(KEY)
        assert ledger.published == ledger.waiting == count
        for answers in told.values():
            kept = {payload for payload, status in answers if status is not Published.CONFLICT}
            assert len(kept) == 1
            assert all(
                (payload in kept) == (status is not Published.CONFLICT)
                for payload, status in answers
            )
            assert sum(status is Published.ACCEPTED for _, status in answers) <= 1
        async with world.subscribe("c") as consumer:
            done = 0
            while done < count:
                some = (await world.receive(consumer, 50)).deliveries
                done += sum(answer.ok for answer in await consumer.ack(*some))
        for name, answers in told.items():
            mine = next(payload for payload, status in answers if status is not Published.CONFLICT)
            for payload in (b'"one"', b'"other"'):
                same = Task(key=KEY, id=name, payload=payload)
                (again,) = await world.backend.publisher.publish(same)
                expected = Published.DUPLICATE if payload == mine else Published.CONFLICT
                assert again.status is expected
        assert (await world.control.ledger(KEY)).published == count


@pytest.mark.parametrize("count", [600, pytest.param(100_000, marks=CHAOS)])
async def test_dead_letters_redriven_from_all_sides(folder: Path, count: int) -> None:
    """Fault F19: three operators redrive twice while answers get lost and Redis dies; each task is redriven once."""
    async with World(
        folder, small(tasks=0, consumers=0, keys=(KEY,), operation_timeout=5.0)
    ) as world:
        await world.begin()
        for start in range(0, count, 500):
            some = range(start, min(start + 500, count))
            await world.backend.publisher.publish(*(Task(key=KEY, id=f"t{n}") for n in some))
        backends = await _behind_links(world, 3)
        async with world.subscribe("undertaker") as consumer:
            dead_lettering = dead_lettering_of(world.backend, consumer)
            left = count
            while left:
                for delivery in (await world.receive(consumer, 200)).deliveries:
                    await dead_lettering.dead_letter(delivery, "on purpose", "an error")
                    left -= 1
        for number in range(3):
            (await world.link("consumer", number)).lose_replies(1, after=b"EVALSHA")
        for _ in range(2):
            redriving = [
                asyncio.create_task(_answered(dead_letters_of(one).redrive, KEY))
                for one in backends
            ]
            await world.inflict("kill", "redis", 0, 0.05)
            await asyncio.gather(*redriving)
        ledger = await world.control.ledger(KEY)
        assert (ledger.published, ledger.waiting, ledger.dead) == (count, count, 0)
        seen: list[str] = []
        async with world.subscribe("again") as consumer:
            while len(seen) < count:
                received = await _answered(world.receive, consumer, 200)
                seen += [one.task.id for one in received.deliveries]
                await _answered(consumer.ack, *received.deliveries)
        assert sorted(seen) == sorted(f"t{n}" for n in range(count))
        assert (await world.control.ledger(KEY)).done == count


@each_seed
async def test_cancels_that_race(folder: Path, seed: int) -> None:
    """Fault F21: tasks in any state are cancelled from two sides while they are worked on; each has exactly one end.

    The ack of a cancelled task is refused, and a task that is done is not cancelled.
    """
    count = 120
    async with World(folder, small(tasks=0, consumers=0, keys=(KEY,)), seed=seed) as world:
        await world.begin()
        soon = world.backend.now() + 0.3
        await world.backend.publisher.publish(
            *(
                Task(key=KEY, id=f"t{n}", not_before=soon if n % 4 == 0 else None)
                for n in range(count)
            )
        )
        backends = await _behind_links(world, 2)
        cancelled: list[str] = []
        acked: list[str] = []

        async def cancel(number: int) -> None:
            chance = random.Random(f"{seed} {number}")
            for n in chance.sample(range(count), count // 2):
                await asyncio.sleep(0.004)
                if n % 7 == 0:
                    (await world.link("consumer", number)).cut()
                control = control_of(backends[number])
                if await _answered(control.cancel, KEY, f"t{n}"):
                    cancelled.append(f"t{n}")

        async def work() -> None:
            async with world.subscribe("c") as consumer:
                while (await world.control.ledger(KEY)).waiting + (
                    await world.control.ledger(KEY)
                ).scheduled:
                    received = await consumer.receive(5, 0.1)
                    await asyncio.sleep(0.01)
                    told = await consumer.ack(*received.deliveries)
                    acked.extend(
                        one.task.id
                        for one, answer in zip(received.deliveries, told, strict=True)
                        if answer.ok
                    )

        await asyncio.gather(cancel(0), cancel(1), work())
        ends = {one.task_id: one.state for one in await _statuses(world, count)}
        assert {name for name, state in ends.items() if state is State.DONE} == set(acked)
        assert {name for name, state in ends.items() if state is State.CANCELLED} >= set(
            cancelled
        ) - set(acked)
        assert len(acked) == len(set(acked))
        assert set(ends.values()) <= {State.DONE, State.CANCELLED}
        ledger = await world.control.ledger(KEY)
        assert ledger.done + ledger.cancelled == ledger.published == count


@pytest.mark.parametrize("leases", [3, pytest.param(10, marks=CHAOS)])
async def test_work_that_takes_many_leases(folder: Path, leases: int) -> None:
    """OPEN-C3, fault F22: a task that takes many leases stays with its live consumer, whatever happens to Redis."""
    # With two consumers, one of them might get all tasks.
    shape = small(
        tasks=40, seconds=0.2, simple=True, consumers=1, hold=leases * LEASE, liveness=60.0
    )
    async with World(folder, shape) as world:
        await world.begin()
        await world.holding("consumer", 0, 1)
        await world.inflict("kill", "redis", 0, 0.2)
        await world.inflict("pause", "redis", 0, 0.5)
        outcome = await world.finish()
    figures = passed(outcome)
    assert figures.deliveries == figures.tasks == 40
    assert figures.duplicates == 0
