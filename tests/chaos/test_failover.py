"""The master dies and its replica takes over, with or without the master's last writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.cases import LEASE, LONG, SEEDS, small
from tests.chaos.history import What
from tests.chaos.replication import Guarded, Pair
from tests.chaos.world import Outcome


async def lagging_failover(world: Pair) -> Outcome:
    """Cut the replica off under load, kill the master a little later, promote the replica."""
    await world.begin()
    await world.cut_replica_off()
    await asyncio.sleep(0.4)
    await world.fail_over()
    return await world.finish()


def in_the_cut(world: Pair, outcome: Outcome, what: What, *outcomes: str) -> int:
    """Return the number of answers with these outcomes while the replica was cut off."""
    ((start, end),) = world.terms.waived
    return sum(
        event.what is what and event.outcome in outcomes and start <= event.at <= end
        for event in outcome.events
    )


@pytest.mark.parametrize("seed", SEEDS)
async def test_what_the_replica_lacked_is_lost_and_no_more(folder: Path, seed: int) -> None:
    """Faults C1 and C4: a failover loses or repeats only what was confirmed while the replica was cut off."""
    async with Pair(
        folder, small(tasks=400, seconds=3.0, simple=True, liveness=6.0), seed=seed
    ) as world:
        outcome = await lagging_failover(world)
    verdict = outcome.verdict
    assert verdict.ok, str(verdict)
    published = in_the_cut(world, outcome, What.PUBLISHED, "accepted", "duplicate")
    assert 0 < verdict.figures.lost <= published
    acked = in_the_cut(world, outcome, What.SETTLED, "ok")
    again = {one.task for one in verdict.waived if one.rule in {"R3", "budget"}}
    held = world.shape.consumers * world.shape.limit
    assert len(again) <= acked + held
    assert verdict.figures.recovery.worst <= 5.0


@LONG
@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_confirmed_by_a_replica_is_lost(folder: Path, seed: int) -> None:
    """Fault C2: a publish is confirmed only when the replica has it; otherwise it is repeated, so nothing is lost."""
    shape = small(tasks=400, seconds=3.0, simple=True, liveness=6.0)
    async with Pair(folder, shape, seed=seed, confirmed=True) as world:
        outcome = await lagging_failover(world)
    verdict = outcome.verdict
    assert verdict.ok, str(verdict)
    assert verdict.figures.lost == 0
    assert verdict.figures.tasks == 400


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_replica_in_step_loses_nothing(folder: Path, seed: int) -> None:
    """A failover to a replica that has all writes loses nothing; only deliveries of that moment may be repeated."""
    shape = small(tasks=200, seconds=0.3, simple=True, lease=LEASE)
    async with Pair(folder, shape, seed=seed) as world:
        await world.begin()
        await world.quiesce()
        await world.until(world._in_step, "the replica is in step")
        await world.cut_replica_off()
        await world.fail_over()
        await world.publish(50)
        outcome = await world.finish()
    assert outcome.verdict.ok, str(outcome.verdict)
    assert outcome.verdict.figures.lost == 0
    assert outcome.verdict.figures.tasks == 250


@pytest.mark.parametrize("kind", ["kill", "freeze"])
@pytest.mark.chaos
async def test_sentinels_promote_the_replica(folder: Path, kind: str) -> None:
    """Fault C8: if the master dies or freezes, all clients follow the Sentinels within 15 s, without a restart."""
    shape = small(tasks=900, seconds=3.0, simple=True, liveness=40.0)
    async with Guarded(folder, shape) as world:
        await world.begin()
        taken = await world.lose_master(kind)
        outcome = await world.finish()
    verdict = outcome.verdict
    assert verdict.ok, str(verdict)
    assert verdict.figures.recovery.count > 0
    assert taken + verdict.figures.recovery.worst <= 15.0
