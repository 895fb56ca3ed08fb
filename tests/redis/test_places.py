"""Queues in several places, on real servers: migration from one store to another, and shards on a cluster."""

from __future__ import annotations

import asyncio

from taskqueue_core.backend import Backend
from taskqueue_core.migration import MigratingBackend, start
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_core.sharding.generations import Generation
from taskqueue_core.tasks import Published, Task
from taskqueue_redis import RedisBackend
from taskqueue_redis.scripts.runner import Partitions
from tests.flow.migrating import MemoryHome, migration
from tests.redis.backends import PATIENCE
from tests.redis.clusters import Cluster
from tests.redis.conftest import MakeServer
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer

KEY = "work"


class RedisHome:
    """A Redis store from which processes open and close backends."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url = url
        self.prefix = prefix

    def enter(self) -> Backend:
        """Open a backend on the store."""
        return RedisBackend(settings=settings_for(self.url, prefix=self.prefix))

    async def kill(self, backend: Backend) -> None:
        """Close a backend; its deliveries are released."""
        await backend.aclose()


async def test_from_one_store_to_another(redis_server: RedisServer, redis_prefix: str) -> None:
    """A20, faults J1, J2, J5, J7: in a migration under load with processes killed at some step, all counts agree."""
    homes = [RedisHome(redis_server.url, f"{redis_prefix}{side}") for side in ("old", "new")]
    (await migration(1, homes[0], homes[1], tasks=12)).check()


async def test_from_memory(redis_server: RedisServer, redis_prefix: str) -> None:
    """A20: a migration from the memory backend to Redis works too."""
    (await migration(2, MemoryHome(), RedisHome(redis_server.url, redis_prefix), tasks=12)).check()


async def test_an_old_side_that_is_gone(
    make_server: MakeServer, redis_server: RedisServer, redis_prefix: str
) -> None:
    """Fault J6: if the old server dies during a migration, the new one continues to accept and deliver tasks."""
    server = make_server()
    server.start()
    waits = {"operation_timeout": 2 * PATIENCE}
    old = RedisBackend(settings=settings_for(server.url, prefix=redis_prefix, **waits))
    new = RedisBackend(settings=settings_for(redis_server.url, prefix=redis_prefix))
    both = MigratingBackend(old, new)
    await both.publisher.publish(Task(key=KEY, id="left"))
    await start(both)
    server.kill()
    subscription = both.subscribe([KEY], "worker")
    # The time limit is for the whole loop, because no call may wait for the old backend.
    async with asyncio.timeout(PATIENCE):
        for number in range(20):
            (told,) = await both.publisher.publish(Task(key=KEY, id=f"t{number}"))
            assert told.status is Published.ACCEPTED
            (delivery,) = (await subscription.receive(1, None)).deliveries
            await subscription.ack(delivery)
    await subscription.close()
    await both.aclose()


async def test_shards_over_a_cluster(redis_cluster: Cluster, redis_prefix: str) -> None:
    """A16, fault D5: a queue with several shards uses many partitions but is listed and counted as one queue.

    The number of shards can change.
    """
    inner = RedisBackend(
        settings=settings_for(redis_cluster.url, prefix=redis_prefix, partitions=8)
    )
    backend = ShardedBackend(inner)

    async def shard(number: int) -> None:
        await change_settings(
            backend.control, KEY, lambda found: found.model_copy(update={"shards": number})
        )

    await shard(16)
    partitions = Partitions(redis_prefix, 8)
    assert len({partitions.of(place) for place in Generation(1, 16).shard_keys(KEY)}) == 8
    ids = [f"t{number}" for number in range(120)]
    told = await backend.publisher.publish(*[Task(key=KEY, id=name) for name in ids[:60]])
    assert {one.status for one in told} == {Published.ACCEPTED}
    subscription = backend.subscribe([KEY], "worker")
    done: set[str] = set()

    async def work(number: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(done) < number:
                taken = (await subscription.receive(10, None)).deliveries
                await subscription.ack(*taken)
                done.update(one.task.id for one in taken)

    await work(30)
    await shard(3)
    told = await backend.publisher.publish(*[Task(key=KEY, id=name) for name in ids])
    assert [one.status for one in told].count(Published.DUPLICATE) == 60
    await work(120)
    assert (await backend.control.ledger(KEY)).done == 120
    assert await backend.control.queues() == (KEY,)
    await backend.aclose()
