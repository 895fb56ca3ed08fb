"""In-flight limits, rate limits and pauses under faults, over several consumers and servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from taskqueue_core.capabilities import Order
from taskqueue_core.rate_limit import RateLimit
from tests.chaos.cases import CHAOS, LEASE, LONG, SEEDS, passed, small
from tests.chaos.cast import Actor
from tests.chaos.checker import check
from tests.chaos.history import What
from tests.chaos.limiting import pause, resume
from tests.chaos.replicas import Replicas
from tests.chaos.rules_time import in_flight
from tests.chaos.story import History, Terms
from tests.chaos.world import Outcome, World

pytestmark = LONG

_PLACES = 7
_LIMITS: Mapping[str, Mapping[str, Any]] = {
    "alpha": {"max_inflight": _PLACES},
    "beta": {"rate_limit": RateLimit(max_tokens=20)},
    "gamma": {
        "capacity": 10,
        "max_inflight": 2 * _PLACES,
        "rate_limit": RateLimit(max_tokens=50),
    },
}
_FULL = 20
"""number of tasks published at the end, to see whether all places in flight are free again"""
_HELD = 20
"""number of deliveries that the slow consumer holds"""
_PLENTY = 5 * _HELD
"""number of tasks from which it takes them; it settles some before it holds that many"""

each_seed = pytest.mark.parametrize("seed", SEEDS)


@each_seed
async def test_limits_while_consumers_die(folder: Path, seed: int) -> None:
    """F2, F3, F4, F5, faults F10, F13 and F14: limits hold while consumers are killed or cut off.

    A task that is retried while its queue is full is not lost. All places in flight become free again: tasks published
    at the end use all of them.
    """
    shape = small(consumers=3, lease=1.0, hold=0.1, limits=_LIMITS)
    async with World(folder, shape, seed=seed) as world:
        await world.begin()
        await world.holding("consumer", 0, 5)
        await world.inflict("lose", "link-consumer", 1)
        await asyncio.gather(
            world.inflict("kill", "consumer", 0),
            world.inflict("block", "link-consumer", 1, 1.2 * shape.lease),
            world.inflict("lose", "link-producer", 0),
        )
        await world.inflict("cut", "link-consumer", 2)
        await _fill_every_place(world)
        outcome = await world.finish()
    assert passed(outcome).tasks == shape.tasks + _FULL
    assert _most(outcome, "alpha") == _PLACES
    assert any(event.outcome == "refused" for event in outcome.events)  # a queue was full
    assert _broken_by_lower_limits(outcome, world.terms) == {"R10", "R11"}  # limits were reached


@each_seed
async def test_limits_through_servers(folder: Path, seed: int) -> None:
    """F2, F3, F4, F5, faults F10, F13 and F14: servers and workers share limits, even while some of them are killed."""
    async with Replicas(folder, small(hold=0.1, limits=_LIMITS), seed=seed) as world:
        await world.begin()
        await world.holding("server", 0, 3)
        await world.inflict("kill", "worker", 0)
        await world.inflict("lose", "link-server", 1)
        await world.inflict("stop", "server", 0, 0.1)
        await world.inflict("cut", "link-worker", 1)
        if seed:  # its deliveries return only after a lease and two passes
            await world.inflict("kill", "server", 1, 0.2)
        await _fill_every_place(world)
        outcome = await world.finish()
    assert passed(outcome).tasks == world.shape.tasks + _FULL
    assert _most(outcome, "alpha") == _PLACES
    assert any(event.outcome == "refused" for event in outcome.events)  # a queue was full


def _broken_by_lower_limits(outcome: Outcome, terms: Terms) -> set[str]:
    """Return the rules that would be broken if the limits had been a fifth lower."""
    lower = [
        msgspec.structs.replace(event, value=0.8 * event.value)
        if event.name in {"limit", "rate", "burst"} and event.value
        else event
        for event in outcome.events
    ]
    return {one.rule for one in check(lower, outcome.dump, terms).violations}


async def _fill_every_place(world: World) -> None:
    """Wait until no task is live, then publish enough tasks to use all places."""
    await world.heal()
    for producer in world.cast.of("producer"):
        await world.cast.ended(producer)
    await world.drained()
    await world.publish(_FULL)


def _most(outcome: Outcome, key: str) -> int:
    """Return the maximum number of tasks in flight after the final tasks were published."""
    filled = min(e.at for e in outcome.events if e.what is What.PUBLISH and e.by == "world")
    seen = in_flight(History(outcome.events), key)
    return max((running for at, _, running in seen if at > filled), default=0)


@each_seed
async def test_a_pause_in_a_burst(folder: Path, seed: int) -> None:
    """F6, fault F15: after a confirmed pause nothing is delivered, not even if Redis is killed and restarted.

    Running tasks may take longer than a lease and are settled; publishing continues. Nothing is lost.
    """
    shape = small(consumers=2, tasks=2000, seconds=0.8, take=10, keys=("alpha",), simple=True)
    async with World(folder, shape, seed=seed) as world:
        await world.publish(_PLENTY)
        slow = await _slow_consumer(world)
        await world.holding("consumer", slow.number, _HELD)  # before other consumers take tasks
        await world.begin()
        await world.until(lambda: world.published() >= 400, "the burst is under way")
        await _paused(world, 0.2)
        await world.inflict("kill", "redis", 0, 0.1)
        await world.cast.stop(slow)  # it settles its deliveries first
        await resume(world, "alpha")
        outcome = await world.finish()
    figures = passed(outcome)
    assert figures.tasks == _PLENTY + shape.tasks + _FULL
    assert figures.duplicates == 0
    held = [one for one in History(outcome.events).handouts.values() if one.first.by == slow.name]
    assert max(one.settled_at - one.first.at for one in held) > LEASE


async def _slow_consumer(world: World) -> Actor:
    """Start a consumer that holds up to `_HELD` deliveries and works on each for up to one and a half leases."""
    number = world.shape.consumers
    setup = world.setup("consumer", number) | {"hold": 1.5 * LEASE, "limit": _HELD, "take": 1}
    return world.cast.start("consumer", number, await world.environment("consumer", number), setup)


async def _paused(world: World, seconds: float) -> None:
    """Pause the first queue; assert that publishing continues and only settlements change the rest of the ledger."""
    key = world.shape.keys[0]
    await pause(world, key)
    before = await world.control.ledger(key)
    await world.publish(_FULL)
    await asyncio.sleep(seconds)
    after = await world.control.ledger(key)
    assert after.published >= before.published + _FULL
    assert after.waiting - before.waiting == after.published - before.published
    assert after.done - before.done == before.in_flight - after.in_flight


_CROWD: Mapping[str, Mapping[str, Any]] = {
    "alpha": {"max_inflight": _PLACES, "order": Order.FAIR},
    "beta": {"rate_limit": RateLimit(max_tokens=200), "floor_share": 0.1},
    "gamma": {
        "order": Order.FAIR,
        "max_inflight": 60,
        "tenant_max_inflight": 20,
        "tenant_rate_limit": RateLimit(max_tokens=300),
    },
}


@CHAOS
@pytest.mark.parametrize("seed", range(3))
async def test_fifty_workers_on_three_servers(folder: Path, seed: int) -> None:
    """F2, F3, F5, F6, OPEN-F1, faults F12, F13, F14 and F15: all limits hold together, whichever process dies."""
    shape = small(
        tasks=3000, seconds=10.0, limits=_CROWD, tenants=5, entities=60, priorities=(2, 5, 5, 8),
        answer_timeout=2.0, operation_timeout=4.0, liveness=90.0,
    )  # fmt: skip
    async with Replicas(folder, shape, seed=seed, servers=3, workers=50) as world:
        await world.begin()
        await world.until(lambda: world.published() >= 500, "the load is under way")
        for number in range(3):
            await asyncio.gather(
                *(world.inflict("kill", "worker", 7 * number + n) for n in range(7)),
                world.inflict("cut", "link-worker", 40 + number),
                world.inflict("lose", "link-server", number),
            )
            await world.inflict("kill", "server", number, 0.3)
        await world.inflict("kill", "redis", 0, 0.3)
        await pause(world, "gamma")
        await asyncio.sleep(LEASE)
        await resume(world, "gamma")
        outcome = await world.finish()
    assert passed(outcome).tasks == shape.tasks
    assert outcome.dump.ledgers["alpha"]["expired"]
    takers = {
        event.by.partition(".")[0] for event in outcome.events if event.what is What.DELIVERED
    }
    assert takers == {"server-0", "server-1", "server-2"}
