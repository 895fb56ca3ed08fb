"""A Redis Cluster under load: masters die with and without a replica, slots move, operators see all partitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from taskqueue_core.capabilities import dead_lettering_of, dead_letters_of
from taskqueue_core.tasks import Task
from taskqueue_redis.connection.cluster import slot_of
from taskqueue_redis.scripts.runner import Partitions
from taskqueue_redis.wakeups import channel_of
from tests.chaos.cases import CHAOS, LONG, SEEDS, passed, small
from tests.chaos.clustered import Clustered, Sharded, standstill
from tests.chaos.history import Event, What
from tests.chaos.outages import RECOVERY
from tests.chaos.world import CONFIG, Shape
from tests.redis.clusters import Cluster
from tests.redis.engines import find_engine

pytestmark = LONG

_ELECTION = 1.5
"""seconds that the nodes need to elect a replica, besides the node timeout"""
_UNAFFECTED = 1.0
"""maximum seconds of standstill that still count as unaffected, on a busy machine"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster shared by the tests in which no node dies, because starting one takes seconds."""
    with Cluster(find_engine(), tmp_path_factory.mktemp("cluster"), config=CONFIG) as cluster:
        yield cluster


each_seed = pytest.mark.parametrize("seed", SEEDS)


def clustered(**more: object) -> Shape:
    """Return the shape of a run on a cluster."""
    return small(
        **{"tasks": 600, "seconds": 1.5, "answer_timeout": 1.0, "operation_timeout": 2.0, **more}
    )


@pytest.mark.parametrize("timeout", [500, pytest.param(1500, marks=CHAOS)])
async def test_a_master_with_a_replica_dies(folder: Path, timeout: int) -> None:
    """Fault D2: a dead master's queues are back within three node timeouts and an election; other queues continue.

    Replicas lag behind their master's answers: its last confirmations may be lost or undone, but only in its queues.
    """
    shape = clustered(tasks=1500, seconds=4.5, simple=True)
    config = {"cluster-node-timeout": str(timeout), "cluster-require-full-coverage": "no"}
    async with Clustered(folder, shape, replicas=1, config=config) as world:
        await world.begin()
        dead = world.owner("beta")
        theirs, others = world.keys_of(dead), world.keys_but(dead)
        since = time.monotonic()
        await world.lose_master(dead)
        until = time.monotonic()
        outcome = await world.finish()
    verdict = outcome.verdict
    assert verdict.ok, str(verdict)
    assert {one.task.partition("/")[0] for one in verdict.waived} <= set(theirs)
    assert verdict.figures.duplicates <= verdict.figures.held + len(verdict.waived)
    for what in (What.PUBLISHED, What.DELIVERED):
        assert (
            standstill(outcome.events, theirs, what, since, until) <= 3 * timeout / 1000 + _ELECTION
        )
        assert standstill(outcome.events, others, what, since, until) <= _UNAFFECTED


@each_seed
@pytest.mark.parametrize("coverage", ["yes", "no"])
async def test_a_master_without_a_replica_dies(folder: Path, coverage: str, seed: int) -> None:
    """Fault D3: if a master without a replica dies, its queues stop, or all if the cluster must cover all slots.

    The master returns with its append-only file: all queues continue, and nothing is lost or delivered twice.
    """
    shape = clustered(tasks=1200, seconds=4.5)
    config = {"cluster-node-timeout": "500", "cluster-require-full-coverage": coverage}
    async with Clustered(folder, shape, seed=seed, config=config) as world:
        await world.begin()
        dead = world.owner("beta")
        theirs, others = world.keys_of(dead), world.keys_but(dead)
        since = time.monotonic()
        down = coverage == "yes"
        # A consumer may still start what it received before the cluster went down.
        await world.kill_and_restart(dead, 2.0 if down else 1.1, until_down=down)
        until = time.monotonic()
        outcome = await world.finish()
    figures = passed(outcome)
    assert figures.tasks == world.shape.tasks
    assert figures.duplicates == 0
    for what in (What.PUBLISHED, What.DELIVERED):
        assert standstill(outcome.events, theirs, what, since, until) >= until - since - _UNAFFECTED
        stood = standstill(outcome.events, others, what, since, until)
        assert (stood >= 1.0) if coverage == "yes" else (stood <= _UNAFFECTED), (what, stood)
    assert figures.recovery.worst <= RECOVERY
    assert figures.publishing.worst <= RECOVERY


@each_seed
async def test_a_busy_slot_moves(folder: Path, cluster: Cluster, seed: int) -> None:
    """Fault D4: while the slot of a busy queue moves between masters, key by key, nothing is lost or overtaken.

    Calls wait until all of their keys are on one node.
    """
    shape = clustered(tasks=1200, seconds=2.0)
    async with Clustered(folder, shape, seed=seed, cluster=cluster) as world:
        await world.begin()
        home = world.owner("alpha")
        others = [node for node in world.cluster.masters if node is not home]
        spans: list[tuple[float, float]] = []
        while len(spans) < 3 or (len(spans) < 9 and world.published() < 0.9 * world.shape.tasks):
            spans += [await world.move("alpha", node) for node in (*others, home)]
        outcome = await world.finish()
    figures = passed(outcome)
    assert figures.tasks == world.shape.tasks
    assert figures.duplicates == 0
    waited = _answered_after(outcome.events, "alpha", spans)
    assert waited, "no publish waited for the moving slot"
    assert not world.errors


@each_seed
async def test_slots_move_while_consumers_die(folder: Path, cluster: Cluster, seed: int) -> None:
    """Fault D4: three slots move while consumers and producers are killed; nothing is lost or delivered twice."""
    shape = clustered(tasks=1200, seconds=3.0, consumers=3)
    async with Clustered(folder, shape, seed=seed, cluster=cluster) as world:
        await world.begin()
        for turn in range(2):
            for key in ("alpha", "beta", "gamma"):
                masters = world.cluster.masters
                target = masters[(masters.index(world.owner(key)) + 1) % len(masters)]
                role = "consumer" if key != "beta" else "producer"
                await asyncio.gather(
                    world.move(key, target, pipeline=3), world.inflict("kill", role, turn)
                )
        outcome = await world.finish()
    assert passed(outcome).tasks == world.shape.tasks
    assert not world.errors


async def test_keys_of_a_script_share_a_slot(folder: Path, cluster: Cluster) -> None:
    """Fault D1: all keys of a partition's scripts are in one slot, so no node refuses a script or misses a key."""
    for partition in Partitions("tq", 64).names:
        keys = [
            partition,
            f"{partition}:meta",
            f"{partition}:q:{{x}}/t",
            channel_of(partition, "bell", "{y}"),
        ]
        assert len({slot_of(key) for key in keys}) == 1
    async with Clustered(folder, clustered(), cluster=cluster) as world:
        outcome = await world.run()
        found = await asyncio.to_thread(world.slots_of_keys)
    assert passed(outcome).tasks == world.shape.tasks
    assert not world.errors
    assert found == {slot_of(partition) for partition in world.partitions.names}


async def test_operators_see_every_partition(folder: Path, cluster: Cluster) -> None:
    """FIX-C6, fault D5: lists, counts and purges cover all partitions, which are spread over several nodes."""
    keys = tuple(f"queue-{n}" for n in range(60))
    shape = clustered(tasks=0, consumers=0)
    async with Clustered(folder, shape, cluster=cluster) as world:
        backend = world.backend
        publisher, control, letters = backend.publisher, world.control, dead_letters_of(backend)
        for number, key in enumerate(keys):
            await publisher.publish(*(Task(key=key, id=f"t{n}") for n in range(number % 5 + 2)))
        assert len({world.partitions.of(key) for key in keys}) == len(world.partitions.names)
        consumer = backend.subscribe(keys, "operator")
        taken = await consumer.receive(1000, 1)
        for delivery in taken.deliveries:
            if delivery.task.id == "t0":
                await dead_lettering_of(backend, consumer).dead_letter(delivery, "why", None)
        await consumer.close()  # the tasks that were not dead-lettered wait again
        (*known,) = await control.queues()
        assert set(known) - set(world.shape.keys) == set(keys)
        for number, key in enumerate(keys):
            ledger = await control.ledger(key)
            assert (ledger.published, ledger.waiting, ledger.dead) == (
                number % 5 + 2,
                number % 5 + 1,
                1,
            )
            (letter,) = await letters.list(key)
            assert letter.task.key == key
        assert sum([await letters.redrive(key) for key in keys[:30]]) == 30
        assert sum([await letters.discard(key) for key in keys[30:]]) == 30
        purged = [await control.purge(key) for key in keys]
        assert purged == [n % 5 + 1 + (n < 30) for n in range(60)]
        for key in keys:
            ledger = await control.ledger(key)
            assert (ledger.waiting, ledger.dead, ledger.in_flight) == (0, 0, 0)
            assert ledger.published == ledger.cancelled + ledger.discarded


@each_seed
async def test_the_number_of_shards_changes(folder: Path, cluster: Cluster, seed: int) -> None:
    """A16, fault D7: changing to 4, 8, 3 and 8 shards while all keys are in flight and processes are killed is safe.

    A key moves only when its old shard has no task of it, so its tasks never run concurrently or out of order.
    """
    shape = clustered(tasks=1200, seconds=3.2, consumers=3, entities=60, keyed=True, liveness=60.0)
    async with Sharded(folder, shape, seed=seed, cluster=cluster) as world:
        await world.spread(4)
        await world.begin()
        for turn, number in enumerate((8, 3, 8)):
            await asyncio.gather(
                world.spread(number),
                world.inflict("kill", "consumer", turn),
                world.inflict("kill", "producer", turn % 2),
            )
            await asyncio.sleep(0.3)
        outcome = await world.finish()
    assert passed(outcome).tasks == shape.tasks


def _answered_after(events: Sequence[Event], key: str, spans: Sequence[tuple[float, float]]) -> int:
    """Return the number of publishes that were called while a slot moved and answered after the move."""
    answers = {(e.by, e.call): e.at for e in events if e.what is What.PUBLISHED and e.key == key}
    calls = {(e.by, e.call): e.at for e in events if e.what is What.PUBLISH and e.key == key}
    return sum(
        start < at < end < answers.get(call, 0.0)
        for call, at in calls.items()
        for start, end in spans
    )
