"""Blue/green migration with one backend down, slow or of another type; and rolling a migration back (A20)."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.backend import Capabilities
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, CapabilityMissing, InvalidInput
from taskqueue_core.migration import (
    MigratingBackend,
    MigrationMode,
    MigrationPhase,
    finish,
    rollback,
    start,
    status,
)
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.recordstore import RecordBackend
from taskqueue_core.tasks import Settled, Task
from taskqueue_memory import MemoryBackend
from tests.core.dict_store import DictStore, Disk
from tests.flow.pairs import ACCEPTED, DUPLICATE, KEY, pair, take

pytestmark = pytest.mark.fast_clock


async def test_what_the_new_side_cannot_keep() -> None:
    """A20: if the new backend does not support a queue's settings, start fails, names the queue and closes nothing."""
    old = MemoryBackend()
    await old.control.configure(KEY, QueueSettings(floor_share=0.1))
    new = RecordBackend("dict", DictStore(Disk()), ManualClock(), durable=True)
    both = MigratingBackend(old, new)
    with pytest.raises(InvalidInput, match=f"{KEY}: "):
        await start(both)
    assert (await status(both)).phase is MigrationPhase.IDLE
    (told,) = await old.publisher.publish(Task(key="free"))
    assert told.status is ACCEPTED
    await both.aclose()


async def test_between_different_backends() -> None:
    """A20: a migration works between different backends; its capabilities are those that both of them have."""
    new = RecordBackend("dict", DictStore(Disk()), ManualClock(), durable=True)
    both = MigratingBackend(MemoryBackend(), new)
    assert both.capabilities.names == new.capabilities.names
    assert not both.capabilities.durable
    await both.publisher.publish(Task(key=KEY, id="a"))
    await start(both)
    await both.publisher.publish(Task(key=KEY, id="b"))
    async with both.subscribe([KEY], "worker") as subscription:
        taken = await take(subscription, 2)
        assert await subscription.ack(*taken) == (Settled.OK,) * 2
    assert (await finish(both)).phase is MigrationPhase.FINISHED
    await both.aclose()


def test_control_is_needed() -> None:
    """A backend without the control capability is refused at once, because a migration must be able to close queues."""

    class Bare(MemoryBackend):
        capabilities = Capabilities()

    with pytest.raises(CapabilityMissing, match="control"):
        MigratingBackend(Bare(), MemoryBackend())


async def test_a_dead_old_side_does_not_block_the_new_one() -> None:
    """Fault J6: while the old backend is down or silent, the new one accepts and delivers; later the old one drains."""
    async with pair() as two:
        await two.publish("a", "b")
        await start(two.both)
        async with two.both.subscribe([KEY], "worker") as subscription:
            for name, trouble in (("c", "down"), ("d", "silent")):
                setattr(two.weakness[0], trouble, True)
                loop = asyncio.get_running_loop()
                began = loop.time()
                assert await two.publish(name, f"{name}2") == [ACCEPTED] * 2
                taken = await take(subscription, 2)
                assert loop.time() - began < 1
                assert {one.task.id for one in taken} <= {name, f"{name}2"}
                await subscription.ack(*taken)
                assert (await two.both.health()).ok
                assert (await two.both.control.settings(KEY)).version == 0
                assert all(await two.both.control.statuses(KEY, name))
                await two.both.control.maintain()
                setattr(two.weakness[0], trouble, False)
            assert {one.task.id for one in await take(subscription, 2)} == {"a", "b"}


async def test_a_dead_side_is_reported() -> None:
    """Fault J6: if the new backend or both are down, callers get an error, and no publish counts as accepted."""
    async with pair() as two:
        await start(two.both)
        subscription = two.both.subscribe([KEY], "worker")
        two.weakness[1].down = True
        with pytest.raises(BackendUnavailable):
            await two.publish("a")
        assert not (await two.both.health()).ok
        two.weakness[0].down = True
        with pytest.raises(BackendUnavailable):
            await subscription.receive(1, None)
        with pytest.raises(BackendUnavailable):
            await two.both.control.ledger(KEY)


async def test_strict_takes_in_only_what_both_sides_know() -> None:
    """Fault J6: in mode strict, a publish fails while the old backend cannot be asked for the ids it knows (law 7)."""
    async with pair(MigrationMode.STRICT) as two:
        await start(two.both)
        await two.publish("a")
        two.weakness[0].down = True
        with pytest.raises(BackendUnavailable):
            await two.publish("b")
        two.weakness[0].down = False
        assert await two.publish("a", "b") == [DUPLICATE, ACCEPTED]


async def test_strict_keeps_the_order() -> None:
    """Fault J4: in strict mode a queue's new backend waits until the old one has no live task or retry (law 4)."""
    async with pair(MigrationMode.STRICT) as two:
        await two.publish("a", "b", ordering_key="entity")
        await start(two.both)
        await two.publish("c", ordering_key="entity")
        order: list[str] = []
        async with two.both.subscribe([KEY, "other"], "worker") as subscription:
            (first,) = await take(subscription, 1)
            assert not (await subscription.receive(5, 0)).deliveries
            await two.both.publisher.publish(Task(key="other", id="x"))
            assert [one.task.id for one in await take(subscription, 1)] == ["x"]
            at = two.clock.now() + 5
            await two.both.publisher.schedule_retry(first.task, at, settles=first)
            assert not (await subscription.receive(5, 0)).deliveries
            await two.clock.advance(5)
            while len(order) < 3:
                for delivery in await take(subscription, 1):
                    order.append(delivery.task.id)
                    await subscription.ack(delivery)
        assert order == ["a", "b", "c"]


async def test_strict_keeps_limits() -> None:
    """A20: a queue's in-flight limit and rate limit apply to both backends of a migration together (law 5)."""
    async with pair(MigrationMode.STRICT) as two:
        limits = QueueSettings(max_inflight=2, rate_limit=RateLimit(max_tokens=2, interval=10))
        await two.both.control.configure(KEY, limits)
        await two.publish("a", "b")
        await start(two.both)
        await two.publish("c", "d", "e")
        async with two.both.subscribe([KEY], "worker") as subscription:
            taken = await take(subscription, 2)
            assert not (await subscription.receive(5, 0)).deliveries
            await subscription.ack(*taken)
            await asyncio.sleep(0.15)  # the gates are checked again after this time
            assert not (await subscription.receive(5, 0)).deliveries
            await two.clock.advance(11)
            taken += await take(subscription, 2)
            assert not (await subscription.receive(5, 0)).deliveries
        assert [one.task.id for one in taken] == ["a", "b", "c", "d"]


async def test_back_again() -> None:
    """Fault J2: a rollback is a migration in the other direction; another start may follow it."""
    async with pair() as two:
        await rollback(two.both)
        assert (await status(two.both)).phase is MigrationPhase.IDLE
        await start(two.both)
        await two.publish("a")
        back = await rollback(two.both)
        assert (back.phase, back.leaves, back.unfinished) == (
            MigrationPhase.ROLLED_BACK,
            "new",
            (KEY,),
        )
        assert await two.publish("b") == [ACCEPTED]
        assert await two.where("a", "b") == ["n", "o"]
        async with two.both.subscribe([KEY], "worker") as subscription:
            await subscription.ack(*await take(subscription, 2))
        assert (await finish(two.both)).phase is MigrationPhase.ROLLED_BACK
        assert (await start(two.both)).phase is MigrationPhase.STARTED
        assert await two.publish("a", "b", "c") == [DUPLICATE, DUPLICATE, ACCEPTED]
        assert await two.where("c") == ["n"]


async def test_back_from_a_side_that_is_lost() -> None:
    """Fault J2: if the new store is lost for good, a forced rollback makes the old one accept tasks by itself."""
    async with pair() as two:
        await two.publish("a")
        await start(two.both)
        two.weakness[1].down = True
        with pytest.raises(BackendUnavailable):
            await rollback(two.both)
        forced = await rollback(two.both, force=True)
        assert forced.phase is MigrationPhase.ROLLED_BACK
        assert await two.publish("b", through=two.old) == [ACCEPTED]
        assert await two.publish("a", "c", through=two.open()) == [DUPLICATE, ACCEPTED]


async def test_what_comes_late_is_not_kept_here() -> None:
    """A20: a delivery that a slow backend sends too late for its receive goes to a later one, or back to its queue."""
    async with pair() as two:
        await two.publish("a")
        await start(two.both)
        two.weakness[0].silent = True
        async with two.both.subscribe([KEY], "worker") as subscription:
            assert not (await subscription.receive(1, 0)).deliveries
            two.weakness[0].silent = False
            late = two.both.subscribe([KEY], "other")
            assert [one.task.id for one in await take(late, 1)] == ["a"]
            await late.close()
            assert [one.task.id for one in await take(subscription, 1)] == ["a"]
