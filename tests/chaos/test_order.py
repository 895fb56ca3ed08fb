"""Order under faults: ordering keys, priorities, floor share, tenants; and deadlines in every state."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from taskqueue_core.backend import Subscription
from taskqueue_core.capabilities import Order, revocation_of
from taskqueue_core.tasks import Delivery, Settled
from tests.chaos import fairness
from tests.chaos.cases import CHAOS, LEASE, LONG, SEEDS, passed, small
from tests.chaos.cast import Actor
from tests.chaos.checker import check
from tests.chaos.dumping import ledgers_of, live
from tests.chaos.history import What, merge
from tests.chaos.limiting import swap
from tests.chaos.story import Handout, History, Story, Terms
from tests.chaos.world import Outcome, World

pytestmark = LONG

each_seed = pytest.mark.parametrize("seed", SEEDS)
_HELD = 4
"""maximum number of deliveries that a consumer holds, so that few entities wait for a frozen one"""
_SIGNAL_SECONDS = 0.02
"""seconds for a stop signal to take effect"""


class _Unmaintained(World):
    """A run whose consumers run no maintenance, so that only this process finds a frozen consumer lost."""

    def setup(self, role: str, number: int) -> dict[str, Any]:
        """Turn maintenance off."""
        return super().setup(role, number) | {"housekeeping": 0.0}

    async def only_held_entities_wait(self) -> bool:
        """Return whether each entity with unfinished tasks has a delivery in flight, and all others have ended."""
        ledger = await self.control.ledger(self.shape.keys[0])
        stories = History(merge(self.folder.glob("*.jsonl"))).stories.values()
        waiting = {
            story.ordering_key
            for story in stories
            if not any(one.ends for _, one in story.settlements)
        }
        return len(waiting) <= ledger.in_flight <= _HELD

    async def maintain_until_drained(self) -> None:
        """Run maintenance at its interval until no task is live."""

        async def drained() -> bool:
            await self.control.maintain()
            await asyncio.sleep(self.shape.housekeeping)
            return not live(await ledgers_of(self.backend, self.shape.keys))

        await self.until(drained, "the deliveries of the frozen consumer come again")


async def _freeze_while_it_holds(world: World, number: int) -> Actor:
    """Freeze a consumer that holds at least one delivery. Thaw it and try again if it settled first."""
    actor = world.cast.actors["consumer", number]
    while not actor.frozen:
        await world.holding("consumer", number, 1)
        world.cast.freeze(actor)
        await asyncio.sleep(_SIGNAL_SECONDS)
        if not world.held_by("consumer", number):
            world.cast.thaw(actor)
    return actor


def _handed_out(outcome: Outcome) -> list[tuple[Handout, Story]]:
    """Return all deliveries in the store's order."""
    stories = History(outcome.events).stories.values()
    found = [(handout, story) for story in stories for handout in story.handouts]
    return sorted(found, key=lambda pair: pair[0].order)


def _broken_as_one_entity(outcome: Outcome, terms: Terms) -> set[str]:
    """Return the rules that would be broken if all tasks with an ordering key had the same one."""
    merged = [
        msgspec.structs.replace(event, ordering_key="one") if event.ordering_key else event
        for event in outcome.events
    ]
    return {one.rule for one in check(merged, outcome.dump, terms).violations}


async def _many_entities(
    folder: Path, seed: int, tasks: int, seconds: float, liveness: float = 60.0
) -> None:
    shape = small(
        consumers=8, tasks=tasks, seconds=seconds, keys=("alpha",), entities=100, keyed=True,
        liveness=liveness,
    )  # fmt: skip
    async with World(folder, shape, seed=seed) as world:
        await world.begin()
        for number in range(3):
            await asyncio.gather(
                world.inflict("kill", "consumer", number),
                world.inflict("cut", "link-consumer", number + 3),
                world.inflict("lose", "link-consumer", number + 5),
                world.inflict("kill", "producer", number % 2),
            )
            await world.inflict("kill", "redis", 0, 0.1)
        await world.inflict("freeze", "consumer", 7, 1.2 * LEASE)
        outcome = await world.finish()
    assert passed(outcome).tasks == tasks
    assert "R8" in _broken_as_one_entity(outcome, world.terms)


@each_seed
async def test_entities_while_everything_dies(folder: Path, seed: int) -> None:
    """FIX-C1, faults F1, A1 and B1: of 100 ordering keys over 8 consumers, each runs one task at a time, in order."""
    await _many_entities(folder, seed, 1000, 1.0)


@CHAOS
async def test_a_thousand_tasks_of_each_entity(folder: Path) -> None:
    """Fault F1: with 100,000 tasks of 100 ordering keys, each key runs one task at a time, in order."""
    await _many_entities(folder, 0, 100_000, 90.0, liveness=300.0)


@each_seed
async def test_an_entity_that_is_held_holds_up_no_other(folder: Path, seed: int) -> None:
    """Fault F2: tasks of a frozen consumer's entities wait for redelivery; all other entities continue as usual."""
    shape = small(
        tasks=600, keys=("alpha",), entities=30, keyed=True, simple=True, limit=_HELD, take=_HELD,
    )  # fmt: skip
    async with _Unmaintained(folder, shape, seed=seed) as world:
        await world.begin()
        frozen = await _freeze_while_it_holds(world, 0)
        for producer in world.cast.of("producer"):
            await world.cast.ended(producer)
        await world.until(world.only_held_entities_wait, "all other entities have ended")
        held = await world.control.ledger("alpha")
        assert held.in_flight
        assert held.waiting, "no task waits behind a delivery of the frozen consumer"
        await world.maintain_until_drained()
        world.cast.thaw(frozen)
        outcome = await world.finish()
    assert passed(outcome).redelivery["frozen"].count >= held.in_flight


@pytest.mark.parametrize("number", [1000, pytest.param(10_000, marks=CHAOS)])
async def test_high_priorities_after_many_low_ones(folder: Path, number: int) -> None:
    """FIX-C1, OPEN-C6, fault F3: ten high-priority tasks published after many low ones come next, in their order."""
    shape = small(tasks=0, consumers=0, keys=("alpha",), take=20, limit=20)
    async with World(folder, shape) as world:
        await world.publish(number, priority=1)
        high = [told.task_id for told in await world.publish(10, priority=9)]
        await world.begin()
        for consumer in range(2):
            await world.start("consumer", consumer)
        await world.drained(seconds=60.0)
        outcome = await world.finish()
    assert passed(outcome).tasks == number + 10
    assert [story.task for _, story in _handed_out(outcome)[:10]] == high


@pytest.mark.parametrize(("seconds", "rate"), [(1.0, 500), pytest.param(60.0, 200, marks=CHAOS)])
async def test_a_flood_of_high_priorities(folder: Path, seconds: float, rate: int) -> None:
    """OPEN-C8, fault F4: during a flood of high priorities, the lowest priority still gets its share of deliveries."""
    share, flood = 0.1, round(rate * seconds)
    shape = small(
        tasks=flood, seconds=seconds, keys=("alpha",), priorities=(9,), consumers=3, liveness=120.0,
        limits={"alpha": {"floor_share": share, "max_inflight": 4}},
    )  # fmt: skip
    async with World(folder, shape) as world:
        await world.publish(flood // 2, priority=0)
        await world.begin()
        outcome = await world.finish()
    passed(outcome)
    firsts = [story.priority for handout, story in _handed_out(outcome) if not handout.first.losses]
    high = [place for place, priority in enumerate(firsts) if priority == 9]
    # Use only the first 80 percent, because retried tasks of high priority come after the flood.
    flooded = firsts[high[0] : high[round(0.8 * len(high))]]
    assert firsts.count(0) > flooded.count(0), "all low priorities were delivered during the flood"
    assert flooded.count(0) >= 0.8 * share * len(flooded)


@each_seed
async def test_turns_of_tenants_while_the_order_changes(folder: Path, seed: int) -> None:
    """B12, OPEN-B4, fault F5: the order of queues changes ten times under load while consumers and Redis are killed."""
    shape = small(
        consumers=3, tasks=1500, seconds=2.0, keys=("alpha", "beta"), tenants=6, entities=20,
        limits={"alpha": {"order": Order.FAIR, "weights": {"t1": 2}, "max_inflight": 12}},
    )  # fmt: skip
    async with World(folder, shape, seed=seed) as world:
        await world.begin()
        for turn in range(5):
            await asyncio.gather(swap(world, "alpha"), swap(world, "beta"))
            if turn % 2:
                await world.inflict("kill", "consumer", turn % 3)
        await world.inflict("kill", "redis", 0, 0.1)
        for _ in range(5):
            await asyncio.gather(swap(world, "alpha"), swap(world, "beta"))
        outcome = await world.finish()
    assert passed(outcome).tasks == shape.tasks


async def test_one_tenant_of_many_tasks(folder: Path) -> None:
    """OPEN-B4, fault F5: next to a tenant with 5,000 tasks, 99 tenants with ten wait about as long as without it."""
    turns = await fairness.measure(folder, 5000)
    assert turns.p99 <= fairness.SLOWER * turns.idle_p99 + fairness.SLACK, turns
    assert turns.jain >= fairness.JAIN, turns


async def test_deadlines_pass_wherever_a_task_is(folder: Path) -> None:
    """OPEN-A6, fault F12: a task expires once in any state: waiting, scheduled, running, or while Redis is down."""
    shape = small(tasks=0, consumers=0, keys=("alpha",))
    async with World(folder, shape) as world:
        await world.begin()
        async with world.subscribe("slow") as slow:
            await slow.receive(1, 0)
            now = world.backend.now()
            await world.publish(10, deadline=now + 0.7)
            running = await _taken(world, slow, 10)
            waiting = await world.publish(10, deadline=now + 0.7)
            scheduled = await world.publish(10, not_before=now + 0.9, deadline=now + 1.0)
            away = await world.publish(10, not_before=now + 1.3, deadline=now + 1.5)
            ended: set[str] = set()
            revocation = revocation_of(world.backend, slow)
            async with asyncio.timeout(5):
                while len(ended) < 10:
                    await world.control.maintain()
                    told = asyncio.ensure_future(revocation.revoked())
                    await asyncio.wait([told], timeout=0.1)
                    told.cancel()
                    ended.update(told.result() if told.done() and not told.cancelled() else ())
            assert ended == {delivery.receipt for delivery in running}
            assert set(await slow.ack(*running)) == {Settled.LEASE_LOST}
            await world.inflict("kill", "redis", 0, max(0.0, now + 1.6 - world.backend.now()))
        await world.start("consumer", 0)
        await world.drained()
        outcome = await world.finish()
    passed(outcome)
    assert len(waiting) == len(scheduled) == len(away) == 10
    assert (
        outcome.dump.ledgers["alpha"]["expired"] == outcome.dump.ledgers["alpha"]["published"] == 40
    )


async def _taken(world: World, subscription: Subscription, number: int) -> list[Delivery]:
    """Receive this many deliveries and record them as a consumer does."""
    found: list[Delivery] = []
    while len(found) < number:
        found += (await world.receive(subscription, number - len(found))).deliveries
    for delivery in found:
        world.log.came(delivery)
    return found


@each_seed
async def test_deliveries_that_hang(folder: Path, seed: int) -> None:
    """C18, fault G4: a delivery not settled in time loses its receipt and comes again; no other delivery does."""
    shape = small(
        tasks=600, keys=("alpha", "beta"), hanging=("alpha", "beta"), consumers=3,
        limits={key: {"max_processing_time": 0.8, "max_inflight": 40} for key in ("alpha", "beta")},
    )  # fmt: skip
    async with World(folder, shape, seed=seed) as world:
        await world.begin()
        await world.inflict("kill", "consumer", 0)
        await world.inflict("kill", "redis", 0, 0.1)
        outcome = await world.finish()
    assert outcome.verdict.ok, str(outcome.verdict)
    assert outcome.verdict.figures.lost == 0
    revoked = [event for event in outcome.events if event.what is What.REVOKED]
    assert revoked
    assert outcome.verdict.figures.stale >= len(revoked)
