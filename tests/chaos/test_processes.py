"""Consumers that are killed, frozen, or started all at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.cases import CHAOS, LEASE, LONG, PASSES, SEEDS, SLACK, passed, small
from tests.chaos.world import World

each_seed = pytest.mark.parametrize("seed", SEEDS)


@each_seed
async def test_killed_after_the_work_and_before_the_ack(folder: Path, seed: int) -> None:
    """Faults A1 and A2, OPEN-A5, A15: tasks executed but not acked at a kill are redelivered once, and in time."""
    async with World(folder, small(simple=True, hold=0.2), seed=seed) as world:
        await world.begin()
        await world.holding("consumer", 0, 5)
        (await world.link("consumer", 0)).block(down=False)
        await world.until(lambda: world.held_by("consumer", 0) == 0, "every ack is on its way")
        unanswered = _unanswered(world)
        await world.cast.kill(world.cast.actors["consumer", 0])
        # Data that the dead process had sent is dropped, too.
        (await world.link("consumer", 0)).cut()
        figures = passed(await world.finish())
    assert figures.duplicates == unanswered == figures.held > 0
    assert figures.redelivery["killed"].worst <= LEASE + PASSES + SLACK


def _unanswered(world: World) -> int:
    consumer = world.cast.actors["consumer", 0]
    return consumer.noted('"what":"settle",') - consumer.noted('"what":"settled"')


@each_seed
async def test_a_frozen_consumer(folder: Path, seed: int) -> None:
    """Fault A4, laws 2 and 3: a frozen consumer's tasks are redelivered; its late acks are refused, and it works on."""
    async with World(folder, small(hold=0.2, simple=True), seed=seed) as world:
        await world.begin()
        await world.holding("consumer", 0, 5)
        await world.inflict("freeze", "consumer", 0, (3 if seed else 2) * LEASE)
        figures = passed(await world.finish())
    assert figures.duplicates > 0
    assert figures.stale >= figures.duplicates
    assert figures.redelivery["frozen"].worst <= LEASE + PASSES + SLACK


@CHAOS
@pytest.mark.parametrize("seed", range(10))
async def test_a_frozen_consumer_that_wakes_in_time(folder: Path, seed: int) -> None:
    """A freeze that is shorter than the rest of the lease causes no redelivery (OPEN-A7)."""
    async with World(folder, small(hold=0.2), seed=seed) as world:
        await world.begin()
        await world.holding("consumer", 0, 5)
        await world.inflict("freeze", "consumer", 0, LEASE / 4)
        figures = passed(await world.finish())
    assert figures.duplicates == 0


@LONG
@each_seed
async def test_killed_while_due_tasks_move(folder: Path, seed: int) -> None:
    """Fault A8: if the process that makes due tasks available dies, nothing is lost, doubled or early."""
    async with World(folder, small(tasks=0, consumers=3), seed=seed) as world:
        await world.begin()
        due = world.backend.now() + 0.3
        await world.publish(1000, not_before=due)
        for number in range(2):
            await world.until(lambda: world.backend.now() >= due - 0.02, "almost due")
            await asyncio.sleep(0.02 * number)
            await world.inflict("kill", "consumer", number)
        figures = passed(await world.finish())
    assert figures.tasks == 1000


@LONG
@each_seed
async def test_many_start_at_once(folder: Path, seed: int) -> None:
    """Fault A12, FIX-C2: 10 processes with one worker name are 10 consumers; no task goes to two of them."""
    shape = small(consumers=10, tasks=500, hold=0.1, take=5)
    async with World(folder, shape, seed=seed) as world:
        world.identity = "same"
        await world.begin()
        (worker,) = await world.control.workers()
        assert worker.connections == 10
        figures = passed(await world.finish())
    assert figures.duplicates == 0
