"""Tasks that wait for others in sharded queues of Redis, and while tasks move from another store to Redis (U16)."""

from __future__ import annotations

from contextlib import aclosing

from taskqueue_core.migration import MigratingBackend, finish, start
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_memory import MemoryBackend
from taskqueue_redis import RedisBackend
from tests.flow.pairs import KEY
from tests.flow.test_after_through import carry_all, publish, run, waiting
from tests.flow.test_shards import shard


async def test_shards_of_redis(redis_url: str) -> None:
    """A16, U16: parents and children in any shards find one another by lines, with results; each runs once."""
    assert redis_url
    async with aclosing(ShardedBackend(RedisBackend())) as backend:
        await publish(backend, "first")
        await shard(backend, 3)
        await publish(
            backend,
            *(f"p{n}" for n in range(6)),
            *(waiting(f"c{n}", f"p{n}", "first", inputs=(1, 0)) for n in range(6)),
            waiting("last", *(f"c{n}" for n in range(6))),
        )
        await carry_all(backend)
        await run(backend, 7)
        found = await run(backend, 6)
        for n in range(6):
            assert found[f"c{n}"].inputs == (b'"first"', f'"p{n}"'.encode())
        assert [*await run(backend, 1)] == ["last"]
        assert (await backend.control.ledger(KEY)).done == 14


async def test_from_another_store_to_redis(redis_url: str) -> None:
    """A20, U16: tasks of a memory store and of Redis wait for one another; each store names its entries differently."""
    assert redis_url
    async with aclosing(MigratingBackend(MemoryBackend(), RedisBackend())) as both:
        await publish(both, "old", waiting("old-child", "old", "new", inputs=(0, 1)))
        await start(both)
        await publish(both, "new", waiting("new-child", "old", "new", inputs=(0, 1)))
        await carry_all(both)
        await run(both, 2)
        found = await run(both, 2)
        assert sorted(found) == ["new-child", "old-child"]
        assert {each.inputs for each in found.values()} == {(b'"old"', b'"new"')}
        assert not (await finish(both)).uncarried
