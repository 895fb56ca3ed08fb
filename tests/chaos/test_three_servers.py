"""Three servers and two hundred workers; one of each is killed every two seconds, and dashboards stay correct."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.cases import CHAOS, LONG, passed
from tests.chaos.fleet import EVERY, Fleet, Onlooker
from tests.chaos.history import What
from tests.chaos.world import Shape

pytestmark = LONG

WORKERS, CROWDS, EACH = 5, 5, 39
#: The tasks are few: on a machine with two cores the kills should be the load.
RATE = 60


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=CHAOS)])
async def test_one_of_each_every_two_seconds(folder: Path, seconds: int) -> None:
    """Faults A1, A6: killing a server and a worker every 2 s loses nothing, and each dashboard matches the ledger."""
    shape = Shape(
        tasks=RATE * seconds,
        seconds=float(seconds),
        lease=6.0,
        hold=1.5,
        liveness=90.0,
        answer_timeout=4.0,
        operation_timeout=8.0,
    )
    async with Fleet(folder, shape, crowds=CROWDS, each=EACH, workers=WORKERS) as world:
        await world.begin()
        assert len(await world.control.workers()) == 200
        onlooker, over = Onlooker(world), asyncio.Event()
        looking = asyncio.create_task(onlooker.look(over))
        try:
            world.phase("faults")
            pairs = await world.rage(seconds)
            await world.heal()
            await world.quiesce()
        finally:
            over.set()
            await looking
        for address in world.addresses:
            assert await onlooker.sample(address)
        outcome = await world.judge()

    figures = passed(outcome)
    assert figures.tasks == RATE * seconds
    assert pairs >= seconds / EVERY - 1
    killed = [event.name for event in outcome.events if event.what is What.KILLED]
    assert (killed.count("server"), killed.count("worker")) == (pairs, pairs)
    assert not onlooker.faults
    assert onlooker.samples >= seconds
    assert onlooker.equal >= 3, (
        "at the end the ledger is stable, so all three servers must match it"
    )
    print(f"{figures}; {onlooker.samples} looks, {onlooker.equal} at what stood still")  # noqa: T201 - figures
