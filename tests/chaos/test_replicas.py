"""Two server replicas on one Redis: workers use WebSockets, producers use HTTP, and either server may go away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cases import LEASE, LONG, SEEDS, SLACK, passed, small
from tests.chaos.history import Event, What
from tests.chaos.replicas import Replicas
from tests.chaos.world import Outcome

#: Maximum seconds of two passes of maintenance: servers run one every 2 s, plus or minus a quarter.
PASSES = 2 * 2.5


def executed(outcome: Outcome) -> list[Event]:
    """Return the events of handlers that began to execute a task."""
    return [event for event in outcome.events if event.what is What.EXECUTED]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_killed_server(folder: Path, seed: int) -> None:
    """Fault A6, E1: if a server is killed with leases out, workers and producers use the other one; nothing is lost."""
    shape = small(tasks=300, seconds=0.6, hold=0.4)
    pinned = {("worker", 0): 0, ("producer", 0): 0}
    async with Replicas(folder, shape, seed=seed, pinned=pinned) as world:
        await world.begin()
        await world.holding("server", 0, 20)
        await world.cast.kill(world.cast.actors["server", 0])
        world.pinned.clear()
        outcome = await world.finish()
    figures = passed(outcome)
    assert figures.tasks == 300
    # A worker that reconnects in time keeps its tasks; the others are redelivered when their leases expire.
    assert figures.redelivery["killed"].worst <= LEASE + PASSES + SLACK


@LONG
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_server_that_stops(folder: Path, seed: int) -> None:
    """Fault A7: on SIGTERM under load, unsettled tasks continue at the other server, once and without loss."""
    shape = small(tasks=300, seconds=0.6, hold=0.5)
    async with Replicas(folder, shape, seed=seed, env={"TASKQUEUE_DRAIN": "0.1"}) as world:
        await world.begin()
        await world.holding("server", 0, 10)
        await world.inflict("stop", "server", 0, 0.1)
        outcome = await world.finish()
    figures = passed(outcome)
    assert figures.duplicates == 0
    assert figures.tasks == 300
    assert any(event.what is What.ADOPTED for event in outcome.events)
    assert not any(event.losses for event in outcome.events)


@LONG
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_killed_worker(folder: Path, seed: int) -> None:
    """Fault A1, REV-E3, OPEN-A5: when a killed worker's socket closes, others get its tasks within a second."""
    async with Replicas(folder, small(tasks=150, hold=0.8), seed=seed) as world:
        await world.begin()
        await world.until(lambda: begun(world, 0) >= 5, "the worker runs some")
        killed = world.log.note(What.FAULT, name="kill worker", target="worker 0")
        victim = world.cast.actors["worker", 0]
        await world.cast.kill(victim)
        outcome = await world.finish()
    passed(outcome)
    ran = [e for e in executed(outcome) if e.by == victim.name and e.at <= killed.at]
    again = [
        event.at - killed.at
        for event in executed(outcome)
        for one in ran
        if event.task == one.task and event.losses == one.losses + 1
    ]
    assert again
    assert max(again) <= 1.0 + SLACK


def begun(world: Replicas, number: int) -> int:
    """Return the number of handlers that a worker has begun."""
    return world.cast.actors["worker", number].noted('"what":"executed"')
