"""Changes of the number of shards whose process is killed before they are complete (fault J2)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_core.sharding.generations import Generation, shard_of
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend
from tests.clock import LoopClock
from tests.flow.pairs import take
from tests.flow.test_shards import ACCEPTED, DUPLICATE, KEY, drain, names, publish, shard

pytestmark = pytest.mark.fast_clock


@pytest.mark.parametrize("cut", range(1, 14))
async def test_a_change_that_was_killed(cut: int) -> None:
    """Fault J2 for shards: if a change is killed after any step, another process completes it; one copy of each id."""
    inner = MemoryBackend(clock=LoopClock())
    first = ShardedBackend(inner)
    await shard(first, 2)
    await publish(first, *names(10))
    control, left = inner.control, cut

    class Cut:
        def __getattr__(self, name: str) -> Any:
            return getattr(control, name)

        async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
            nonlocal left
            left -= 1
            if left < 0:
                raise asyncio.CancelledError
            return await control.configure(key, settings)

    doomed = ShardedBackend(inner)
    doomed.generations._control = doomed.control._inner = Cut()  # type: ignore[attr-defined]
    task = asyncio.create_task(shard(doomed, 3))
    await asyncio.gather(task, return_exceptions=True)
    for process in (first, ShardedBackend(inner)):
        assert await publish(process, *names(10)) == [DUPLICATE] * 10
    assert await publish(first, "x", "y", "z") == [ACCEPTED] * 3
    late = ShardedBackend(inner)
    assert await publish(late, "x", "y", "z") == [DUPLICATE] * 3
    await late.control.maintain()
    assert (await shard(late, 3)).shards == 3
    assert await publish(late, "x", "y", "z", *names(10)) == [DUPLICATE] * 13
    subscription = late.subscribe([KEY], "worker")
    assert await drain(subscription, 13) == {"x", "y", "z", *names(10)}
    await late.aclose()


async def test_a_shard_is_drained_only_once_it_is_closed() -> None:
    """Fault J2, law 4: a shard that a killed change left open can still get tasks, so a later shard has to wait."""
    inner = MemoryBackend(clock=LoopClock())
    one, two, three = (ShardedBackend(inner) for _ in range(3))
    settings = await shard(one, 2)
    assert await publish(two, "a") == [ACCEPTED]
    last, following = Generation(1, 2), Generation(2, 4)
    await one.generations.copy(KEY, settings, following)
    await one.generations.close(last.shard_key(KEY, 0), following)
    entity = next(name for name in names(20) if shard_of(Task(key=KEY, ordering_key=name), 2) == 1)
    subscription = three.subscribe([KEY], "worker")
    await subscription.ack(*await take(subscription, 1))
    assert not (await subscription.receive(1, 3.0)).deliveries
    assert await publish(two, "b", ordering_key=entity) == [ACCEPTED]
    (first,) = await take(subscription, 1)
    await one.generations.read(KEY)
    assert await publish(one, "c", ordering_key=entity) == [ACCEPTED]
    assert not (await subscription.receive(1, 3.0)).deliveries, "two tasks of one key at a time"
    await subscription.ack(first)
    assert await drain(subscription, 1) == {"c"}
    await one.aclose()
