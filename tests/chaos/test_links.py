"""Lost answers, cancelled calls, and links that are cut, blocked or slow."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.capabilities import control_of, dead_lettering_of
from taskqueue_core.errors import BackendUnavailable, LeaseLost, PublishUnconfirmed
from taskqueue_core.tasks import Delivery, Task
from tests.chaos.cases import CHAOS, HOUSEKEEPING, LONG, SEEDS, SLACK, passed, small
from tests.chaos.proxy import FaultProxy
from tests.chaos.world import World

T = TypeVar("T")
KEY = "alpha"
SCRIPT = b"EVALSHA"


class Case:
    """A backend of this process, and the breakable link that it uses."""

    def __init__(self, world: World, link: FaultProxy, backend: Backend) -> None:
        self.world = world
        self.link = link
        self.backend = backend

    async def publish(self, *names: str) -> None:
        """Publish tasks until they are confirmed."""
        tasks = [Task(key=KEY, id=name) for name in names]
        while True:
            try:
                answers = await self.backend.publisher.publish(*tasks)
            except (PublishUnconfirmed, BackendUnavailable):
                continue
            assert all(answer.stored for answer in answers)
            return

    async def receive(self, subscription: Subscription, limit: int = 1) -> list[Delivery]:
        """Receive until there is a delivery."""
        while True:
            with contextlib.suppress(BackendUnavailable):
                if found := (await subscription.receive(limit, HOUSEKEEPING)).deliveries:
                    return list(found)

    async def state(self, name: str) -> str:
        """Return a task's state, read over a connection without faults."""
        (told,) = await self.world.control.statuses(KEY, name)
        assert told is not None
        return told.state.value


@pytest_asyncio.fixture
async def case(folder: Path) -> AsyncIterator[Case]:
    """A Redis with a backend connected over a breakable link."""
    async with World(folder, small(keys=(KEY,))) as world:
        link = await world.link("case", 0)
        backend = world.open_backend(link.address[1])
        assert (await backend.health()).ok
        yield Case(world, link, backend)
        for key in await world.control.queues():
            assert (await world.control.ledger(key)).balanced


@pytest.mark.parametrize(
    ("count", "silently"),
    [
        (1, False),
        (5, False),
        (1, True),
        pytest.param(10, False, marks=CHAOS),
        pytest.param(50, False, marks=CHAOS),
        pytest.param(5, True, marks=CHAOS),
    ],
)
async def test_the_answer_to_a_publish_is_lost(case: Case, count: int, *, silently: bool) -> None:
    """Fault E1, law 7: however often the answer to a publish is lost, there is one copy of the task."""
    case.link.lose_replies(count, after=SCRIPT, silently=silently)
    await case.publish("t")
    assert case.link.lost == count
    assert (await case.world.control.ledger(KEY)).published == 1


@pytest.mark.parametrize("silently", [False, pytest.param(True, marks=CHAOS)])
@pytest.mark.parametrize("verb", ["ack", "redeliver", "dead_letter", "retry"])
async def test_the_answer_to_a_settlement_is_lost(case: Case, verb: str, *, silently: bool) -> None:
    """Fault E2: a repeated settlement gets the same answer and has no further effect (OPEN-C2)."""
    await case.publish("t")
    async with case.backend.subscribe([KEY], "c") as subscription:
        (delivery,) = await case.receive(subscription)
        case.link.lose_replies(1, after=SCRIPT, silently=silently)
        for _ in range(3):
            try:
                await settle(case.backend, subscription, verb, delivery)
                break
            except BackendUnavailable:
                continue
        assert case.link.lost == 1
        states = {
            "ack": "done",
            "redeliver": "waiting",
            "dead_letter": "dead",
            "retry": "scheduled",
        }
        assert await case.state("t") == states[verb]
        (told,) = await case.world.control.statuses(KEY, "t")
        assert told is not None
        assert (told.attempt, told.losses) == (2 if verb == "retry" else 1, 0)


async def settle(
    backend: Backend, subscription: Subscription, verb: str, delivery: Delivery
) -> None:
    """Settle a delivery by the name of the verb."""
    if verb == "ack":
        await subscription.ack(delivery)
    elif verb == "redeliver":
        await subscription.redeliver(delivery)
    elif verb == "dead_letter":
        await dead_lettering_of(backend, subscription).dead_letter(delivery, "reason")
    else:
        at = backend.now() + 60
        await backend.publisher.schedule_retry(delivery.task, at, settles=delivery)


@pytest.mark.parametrize(
    ("count", "silently"),
    [(1, False), (3, False), (1, True), pytest.param(3, True, marks=CHAOS)],
)
async def test_the_answer_to_a_receive_is_lost(case: Case, count: int, *, silently: bool) -> None:
    """Fault E3, law 4: deliveries of a lost answer arrive within a second, in order, without using an attempt."""
    async with case.backend.subscribe([KEY], "c") as subscription:
        await subscription.receive(1, 0)
        await case.publish(*(f"t{n}" for n in range(6)))
        case.link.lose_replies(count, after=SCRIPT, silently=silently)
        with pytest.raises(BackendUnavailable):
            await subscription.receive(2, 0)
        patience = SLACK + count * (case.world.shape.answer_timeout if silently else 0.2)
        async with asyncio.timeout(patience):
            found = await case.receive(subscription, 2)
        while len(found) < 6:
            found += await case.receive(subscription, 2)
        assert [d.task.id for d in found] == [f"t{n}" for n in range(6)]
        assert {(d.attempt, d.losses) for d in found} == {(1, 0)}
        assert all(told.ok for told in await subscription.ack(*found))


async def test_a_deadline_passes_while_an_answer_is_lost(case: Case) -> None:
    """Faults E3 and F12, law 8: a task in a lost answer is not delivered after its deadline has passed."""
    async with case.backend.subscribe([KEY], "c") as subscription:
        await subscription.receive(1, 0)
        deadline = case.backend.now() + 0.4
        await case.backend.publisher.publish(Task(key=KEY, id="mortal", deadline=deadline))
        case.link.lose_replies(1, after=SCRIPT)
        with pytest.raises(BackendUnavailable):
            await subscription.receive(1, 0)
        await asyncio.sleep(deadline - case.backend.now() + 0.05)
        assert (await subscription.receive(1, 0)).deliveries == ()


@LONG
async def test_a_consumer_takes_something_after_its_lease(case: Case) -> None:
    """Fault A4: a consumer that receives after its lease, without a heartbeat, keeps the task (found by seed 176)."""
    shape, control = case.world.shape, case.world.control
    async with case.backend.subscribe([KEY], "c") as subscription:
        await subscription.receive(1, 0)
        await control.maintain()
        case.backend._context.heartbeat.remove(subscription.token)  # type: ignore[attr-defined]
        loop = asyncio.get_running_loop()
        silent = loop.time()
        while loop.time() < silent + shape.lease + 0.1:
            await asyncio.sleep(shape.housekeeping / 2)
            if loop.time() < silent + shape.lease - 0.2:
                await control.maintain()  # otherwise the freeze guard would grant another lease
        await case.publish("u")
        await case.receive(subscription)
        await control.maintain()
        (told,) = await control.statuses(KEY, "u")
        assert told is not None
        assert (told.state, told.losses) == ("in_flight", 0)


@pytest.mark.parametrize("seed", SEEDS)
async def test_calls_are_cancelled_anywhere(case: Case, seed: int) -> None:
    """Fault E4: 200 cancelled calls leave nothing stuck, lost or doubled, and no answer reaches another caller."""
    chance = random.Random(seed)
    names = [f"t{n}" for n in range(200)]
    seen: list[str] = []
    async with case.backend.subscribe([KEY], "c") as subscription:
        await subscription.receive(1, 0)
        for name in names:
            await cancelled(case.backend.publisher.publish(Task(key=KEY, id=name)), chance)
            await cancelled(case.backend.publisher.publish(Task(key=KEY, id=name)), chance)
            found = await cancelled(subscription.receive(3, 0.5), chance)
            told = await cancelled(control_of(case.backend).statuses(KEY, name), chance)
            if told is not None and told[0] is not None:
                assert told[0].task_id == name
            for delivery in found.deliveries if found else ():
                await cancelled(subscription.ack(delivery), chance)
                seen.append(delivery.task.id)
                with contextlib.suppress(LeaseLost):
                    await subscription.ack(delivery)
        await case.publish(*names)
        async with asyncio.timeout(SLACK + 1.0):
            while (await case.world.control.ledger(KEY)).done < len(names):
                found = await subscription.receive(50, 0.05)
                seen += [delivery.task.id for delivery in found.deliveries]
                if found.deliveries:
                    await subscription.ack(*found.deliveries)
    assert sorted(seen) == sorted(names)


async def cancelled(call: Awaitable[T], chance: random.Random) -> T | None:
    """Cancel a call a little later; return its answer if it was faster."""
    task = asyncio.ensure_future(call)
    await asyncio.wait([task], timeout=chance.choice([0.0, 0.0003, 0.001, 0.003]))
    task.cancel()
    # Not `asyncio.timeout`, which would drop the answer of a call that ends in the same moment.
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


@pytest.mark.parametrize("kind", ["block", pytest.param("deafen", marks=CHAOS)])
@pytest.mark.parametrize(
    "length", [1.0, *(pytest.param(n, marks=CHAOS) for n in (5.0, 30.0, 300.0))]
)
async def test_all_connections_are_cut(folder: Path, kind: str, length: float) -> None:
    """Fault E5: links blocked in one or both directions for seconds or minutes lose nothing; all recover soon after."""
    shape = small(seconds=1.0, hold=0.05, liveness=60.0)
    async with World(folder, shape) as world:
        await world.begin()
        await asyncio.gather(
            *(
                world.inflict(kind, f"link-{actor.role}", actor.number, length)
                for actor in world.cast.all
            )
        )
        done = (await world.control.ledger(KEY)).done
        await world.until(lambda: progress(world, done), "somebody works again", seconds=5)
        passed(await world.finish())


async def progress(world: World, done: int) -> bool:
    """Return whether more tasks than ``done`` are done now."""
    return (await world.control.ledger(KEY)).done > done


@LONG
async def test_one_byte_at_a_time(folder: Path) -> None:
    """Fault E7: data that arrives in segments of one byte changes nothing."""
    async with World(folder, small(tasks=20, consumers=1, producers=1)) as world:
        for role in ("consumer", "producer"):
            (await world.link(role, 0)).slice(1)
        assert passed(await world.run()).duplicates == 0
