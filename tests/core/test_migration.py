"""Blue/green migration: what holds while two backends are one (A20)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, CapabilityMissing, InvalidInput, LeaseLost
from taskqueue_core.flow import RateLimit
from taskqueue_core.recordstore import RecordBackend
from taskqueue_core.succession import (
    MigratingBackend,
    MigrationMode,
    Phase,
    finish,
    rollback,
    start,
    status,
)
from taskqueue_core.succession.phases import MigrationUnfinished
from taskqueue_core.tasks import Delivery, Health, Published, Refusal, Settled, Task
from taskqueue_memory import MemoryBackend
from tests.core.dict_store import DictStore, Disk

KEY = "work"


class Weak:
    """Anything, until its store is gone: from then on each call fails, or never answers."""

    def __init__(self, inner: Any, store: Weakness) -> None:
        self._inner = inner
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in {"publisher", "control", "dead_letters"}:
            return Weak(found, self._store)
        if name == "subscribe":
            return lambda *words: Weak(found(*words), self._store)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*words: Any, **options: Any) -> Any:
            if name == "health" and self._store.down:
                return Health(ok=False, backend="weak")
            await self._store.check()
            return await found(*words, **options)

        return call


class Weakness:
    """What is wrong with a store."""

    def __init__(self) -> None:
        self.down = False
        self._speaks = asyncio.Event()
        self._speaks.set()

    @property
    def silent(self) -> bool:
        """Whether calls wait until it speaks again."""
        return not self._speaks.is_set()

    @silent.setter
    def silent(self, silent: bool) -> None:
        (self._speaks.clear if silent else self._speaks.set)()

    async def check(self) -> None:
        """Fail, or wait."""
        if self.down:
            raise BackendUnavailable("gone")
        await self._speaks.wait()


class Pair:
    """Two memory backends, and what was opened over them."""

    def __init__(self, mode: MigrationMode = MigrationMode.AVAILABLE) -> None:
        self.clock = ManualClock()
        self.old, self.new = MemoryBackend(clock=self.clock), MemoryBackend(clock=self.clock)
        self.weakness = Weakness(), Weakness()
        self.mode = mode
        self.both = self.open()

    def open(self) -> MigratingBackend:
        """Open both as another process would."""
        old, new = (
            Weak(backend, weakness)
            for backend, weakness in zip((self.old, self.new), self.weakness, strict=True)
        )
        return MigratingBackend(old, new, mode=self.mode, patience=0.05)

    async def publish(self, *ids: str, through: Any = None, **fields: Any) -> list[Published]:
        """Publish, and tell what became of each."""
        tasks = [Task(key=KEY, id=name, **fields) for name in ids]
        return [one.status for one in await (through or self.both).publisher.publish(*tasks)]

    async def where(self, *ids: str) -> list[str]:
        """Return which sides know each task."""
        told = [await side.control.statuses(KEY, *ids) for side in (self.old, self.new)]
        return [("o" if old else "") + ("n" if new else "") for old, new in zip(*told, strict=True)]


@asynccontextmanager
async def pair(mode: MigrationMode = MigrationMode.AVAILABLE) -> AsyncIterator[Pair]:
    """Give a pair, and close it."""
    made = Pair(mode)
    yield made
    for weakness in made.weakness:
        weakness.down = weakness.silent = False
    await made.both.aclose()


async def take(subscription: Any, number: int) -> list[Delivery]:
    """Receive so many."""
    found: list[Delivery] = []
    async with asyncio.timeout(5):
        while len(found) < number:
            found += (await subscription.receive(number - len(found), None)).deliveries
    return found


ACCEPTED, DUPLICATE, REFUSED = Published.ACCEPTED, Published.DUPLICATE, Published.REFUSED


async def test_from_one_side_to_the_other() -> None:
    """A20, fault J1: what was there is executed there, what is new goes to the new side; then nothing is left."""
    async with pair() as two:
        assert await two.publish("a", "b") == [ACCEPTED] * 2
        assert (await status(two.both)).phase is Phase.IDLE
        started = await start(two.both)
        assert (started.phase, started.leaves, started.unfinished) == (Phase.STARTED, "old", (KEY,))
        assert await two.publish("c", "d") == [ACCEPTED] * 2
        assert await two.where("a", "b", "c", "d") == ["o", "o", "n", "n"]
        with pytest.raises(MigrationUnfinished, match=KEY):
            await finish(two.both)
        async with two.both.subscribe([KEY], "worker") as subscription:
            taken = await take(subscription, 4)
            assert sorted(one.task.id for one in taken) == ["a", "b", "c", "d"]
            assert await subscription.ack(*taken) == (Settled.OK,) * 4
        for side in (two.old, two.new):
            assert (await side.control.ledger(KEY)).done == 2
        assert (await two.both.control.ledger(KEY)).published == 4
        done = await finish(two.both)
        assert (done.phase, done.unfinished, done.remembered) == (Phase.FINISHED, (), 300)


async def test_one_copy_of_an_id() -> None:
    """Fault J7: a publish is sent again to whatever process, before, during and after: one copy (law 7)."""
    async with pair() as two:
        await two.publish("a")
        before = two.open()
        await two.publish("x", through=before)
        await start(two.both)
        assert await two.publish("a", "b", "a", "b") == [DUPLICATE, ACCEPTED, DUPLICATE, DUPLICATE]
        assert await two.publish("a", "b", through=before) == [DUPLICATE] * 2
        (told,) = await two.both.publisher.publish(Task(key=KEY, id="a", payload=b"1"))
        assert told.status is Published.CONFLICT
        late = two.open()
        await two.publish("y", through=late)
        await rollback(two.both)
        for through in (two.both, before, late, two.open()):
            assert await two.publish("a", "b", "x", "y", through=through) == [DUPLICATE] * 4
        assert await two.where("a", "b", "x", "y") == ["o", "n", "o", "n"]
        assert await two.publish("c", through=late) == [ACCEPTED]
        assert await two.where("c") == ["o"]


async def test_forgotten_ids_are_free() -> None:
    """Law 7: what ended longer ago than the window is taken in anew, though the old side keeps its result."""
    async with pair() as two:
        await two.publish("a")
        async with two.both.subscribe([KEY], "worker") as subscription:
            await subscription.ack(*await take(subscription, 1), results=[b"1"])
        await start(two.both)
        assert await two.publish("a") == [DUPLICATE]
        await two.clock.advance(302)
        assert await two.both.control.results(KEY, "a") == (b"1",)
        assert await two.publish("a") == [ACCEPTED]
        assert await two.where("a") == ["on"]
        assert await two.both.control.results(KEY, "a") == (None,)


async def test_a_publisher_of_yesterday() -> None:
    """Fault J5: one that knows only the old side is refused there, and what it gets in before is executed."""
    async with pair() as two:
        await two.publish("a")
        await start(two.both)
        (told,) = await two.old.publisher.publish(Task(key=KEY, id="b"))
        assert (told.status, told.code, told.retry_after) == (REFUSED, Refusal.MOVED, None)
        assert await two.publish("a", through=two.old) == [DUPLICATE]
        unseen = Task(key="unseen", id="c")  # a queue that the start knew nothing of
        (told,) = await two.old.publisher.publish(unseen)
        assert told.status is ACCEPTED
        assert (await status(two.both)).open_queues == ("unseen",)
        await two.both.control.maintain()
        (told,) = await two.old.publisher.publish(Task(key="unseen", id="d"))
        assert told.code is Refusal.MOVED
        (told,) = await two.both.publisher.publish(unseen)
        assert told.status is DUPLICATE
        async with two.both.subscribe(["unseen"], "worker") as subscription:
            assert (await take(subscription, 1))[0].task == unseen


async def test_a_queue_first_used_meanwhile() -> None:
    """Fault J5: the old side is closed to it before the new one takes it in."""
    async with pair() as two:
        await start(two.both)
        assert await two.publish("a") == [ACCEPTED]
        assert await two.where("a") == ["n"]
        assert await two.publish("a", "b", through=two.old) == [REFUSED] * 2


async def test_receipts_never_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault J3: where both sides give out the same receipt, each settlement ends the delivery that it is about."""
    monkeypatch.setattr("secrets.token_hex", lambda _=None: "same")
    monkeypatch.setattr("secrets.token_urlsafe", lambda _=None: "same")
    async with pair() as two:
        await two.publish("a")
        await start(two.both)
        await two.publish("b")
        async with two.both.subscribe([KEY], "worker") as subscription:
            taken = {one.task.id: one for one in await take(subscription, 2)}
            inner = [two.both.inward(taken[name])[1].receipt for name in ("a", "b")]
            assert inner[0] == inner[1]
            assert taken["a"].receipt != taken["b"].receipt
            await subscription.ack(taken["a"])
            assert (await two.old.control.ledger(KEY)).done == 1
            assert (await two.new.control.ledger(KEY)).in_flight == 1
            assert await two.both.control.progress(taken["b"], 0.5)
            with pytest.raises(LeaseLost):
                await subscription.redeliver(taken["a"])
            assert await subscription.redeliver(taken["a"], taken["b"]) == (
                Settled.LEASE_LOST,
                Settled.OK,
            )


async def test_each_verb_at_its_origin() -> None:
    """A20: retries, burials, hand-overs and revocations go to the side that has the task."""
    async with pair() as two:
        await two.publish("a", "b", "c", "d")
        await start(two.both)
        one, other = (two.both.subscribe([KEY], "worker") for _ in range(2))
        taken = {delivery.task.id: delivery for delivery in await take(one, 4)}
        publisher, control = two.both.publisher, two.both.control
        await publisher.schedule_retry(taken["a"].task, two.clock.now(), settles=taken["a"])
        assert await one.dead_letter(taken["b"], "bad") is Settled.OK
        (adopted,) = await other.adopt(taken["c"].receipt)
        assert adopted is not None
        assert adopted.receipt == taken["c"].receipt
        lost = asyncio.create_task(one.revoked())
        assert await control.cancel(KEY, "d")
        assert await lost == (taken["d"].receipt,)
        assert await other.ack(adopted) == (Settled.OK,)
        ledger = await two.old.control.ledger(KEY)
        counts = ledger.scheduled + ledger.waiting, ledger.dead, ledger.done, ledger.cancelled
        assert counts == (1, 1, 1, 1)
        assert [letter.task.id for letter in await two.both.dead_letters.list(KEY)] == ["b"]
        assert await two.both.dead_letters.redrive(KEY) == 1
        assert sorted(delivery.attempt for delivery in await take(other, 2)) == [1, 2]
        await publisher.schedule_retry(taken["c"].task, two.clock.now(), token="again")
        assert await two.where("a", "b", "c", "d") == ["o"] * 4
        for subscription in (one, other):
            await subscription.close()


async def test_a_worker_that_was_there_before() -> None:
    """A20: a delivery of before the migration is adopted under the receipt that its worker knows."""
    async with pair() as two:
        await two.publish("a")
        before = two.old.subscribe([KEY], "worker")
        (delivery,) = await take(before, 1)
        await start(two.both)
        async with two.both.subscribe([KEY], "worker") as subscription:
            (adopted,) = await subscription.adopt(delivery.receipt)
            assert adopted == delivery
            assert await subscription.ack(adopted) == (Settled.OK,)
            assert await subscription.adopt("unknown") == (None,)


async def test_dead_letters_of_both() -> None:
    """A20: they are listed page by page, the old side's first, and stay where they are."""
    async with pair() as two:
        async with two.both.subscribe([KEY], "worker") as subscription:
            for number in range(6):
                if number == 3:
                    await start(two.both)
                await two.publish(f"t{number}")
                await subscription.dead_letter((await take(subscription, 1))[0], "bad")
        seen: list[str] = []
        while page := await two.both.dead_letters.list(
            KEY, limit=2, after=seen[-1] if seen else None
        ):
            seen += [letter.task.id for letter in page]
        assert seen == [f"t{number}" for number in range(6)]
        assert (await status(two.both)).unfinished == (KEY,)
        assert await two.both.dead_letters.discard(KEY, "t0", "t5") == 2
        assert (await finish(two.both, force=True)).phase is Phase.FINISHED


async def test_settings_move_and_hold_on_both_sides() -> None:
    """A20: copied at the start where the new side has none, then changed on both; a pause holds on both (laws 5, 9)."""
    async with pair() as two:
        await two.old.control.configure(KEY, QueueSettings(max_losses=1, capacity=9))
        await two.old.control.configure("other", QueueSettings(max_losses=2))
        await two.new.control.configure("other", QueueSettings(max_losses=3))
        await two.publish("a")
        await start(two.both)
        control = two.both.control
        found = await control.settings(KEY)
        assert (found.max_losses, found.capacity, found.moved_to) == (1, 9, None)
        assert (await control.settings("other")).max_losses == 3
        await control.configure(KEY, found.model_copy(update={"paused": True}))
        await two.publish("b")
        for side in (two.old, two.new, two.both):
            subscription = side.subscribe([KEY], "worker")
            assert not (await subscription.receive(5, 0)).deliveries
            await subscription.close()
        await rollback(two.both)
        found = await control.settings(KEY)
        assert (found.max_losses, found.paused, found.moved_to) == (1, True, None)


async def test_what_the_new_side_cannot_keep() -> None:
    """A20: a start that the new side's settings do not allow names queue and setting, and has closed nothing."""
    old = MemoryBackend()
    await old.control.configure(KEY, QueueSettings(floor_share=0.1))
    clock = ManualClock()
    new = RecordBackend("dict", DictStore(Disk()), clock, durable=True)
    if Capability.ORDER in new.capabilities.names:  # then it keeps all there is, but for copies
        await old.control.configure(KEY, QueueSettings(version=1, bound_to=("a", "b")))
    both = MigratingBackend(old, new)
    with pytest.raises(InvalidInput, match=f"{KEY}: "):
        await start(both)
    assert (await status(both)).phase is Phase.IDLE
    (told,) = await old.publisher.publish(Task(key="free"))
    assert told.status is ACCEPTED
    await both.aclose()


async def test_between_different_backends() -> None:
    """A20: any two backends will do, and the pair has the capabilities that both have."""
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
    assert (await finish(both)).phase is Phase.FINISHED
    await both.aclose()


def test_control_is_needed() -> None:
    """A backend whose queues cannot be closed cannot be migrated, and that is told at once."""

    class Bare(MemoryBackend):
        capabilities = Capabilities()

    with pytest.raises(CapabilityMissing, match="control"):
        MigratingBackend(Bare(), MemoryBackend())


async def test_a_dead_old_side_holds_up_nobody() -> None:
    """Fault J6: with the old side gone or silent the new one takes in and hands out; afterwards the old one drains."""
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


async def test_a_dead_side_is_told() -> None:
    """Fault J6: with both sides gone, or the new one, callers learn it; nothing is taken for accepted."""
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
    """Fault J6: in mode strict a publish fails while the old side cannot say which ids it knows (law 7)."""
    async with pair(MigrationMode.STRICT) as two:
        await start(two.both)
        await two.publish("a")
        two.weakness[0].down = True
        with pytest.raises(BackendUnavailable):
            await two.publish("b")
        two.weakness[0].down = False
        assert await two.publish("a", "b") == [DUPLICATE, ACCEPTED]


async def test_strict_keeps_the_order() -> None:
    """Fault J4: the new side of a queue waits until the old one has nothing live of it, retries among it (law 4)."""
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
    """A20: in flight over both sides and in any period there is never more than a queue's limit (law 5)."""
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
            await asyncio.sleep(0.15)  # after which the gates are looked at again
            assert not (await subscription.receive(5, 0)).deliveries
            await two.clock.advance(11)
            taken += await take(subscription, 2)
            assert not (await subscription.receive(5, 0)).deliveries
        assert [one.task.id for one in taken] == ["a", "b", "c", "d"]


async def test_back_again() -> None:
    """Fault J2: a rollback is the same in the other direction, and may be followed by another start."""
    async with pair() as two:
        await rollback(two.both)
        assert (await status(two.both)).phase is Phase.IDLE
        await start(two.both)
        await two.publish("a")
        back = await rollback(two.both)
        assert (back.phase, back.leaves, back.unfinished) == (Phase.ROLLED_BACK, "new", (KEY,))
        assert await two.publish("b") == [ACCEPTED]
        assert await two.where("a", "b") == ["n", "o"]
        async with two.both.subscribe([KEY], "worker") as subscription:
            await subscription.ack(*await take(subscription, 2))
        assert (await finish(two.both)).phase is Phase.ROLLED_BACK
        assert (await start(two.both)).phase is Phase.STARTED
        assert await two.publish("a", "b", "c") == [DUPLICATE, DUPLICATE, ACCEPTED]
        assert await two.where("c") == ["n"]


async def test_back_from_a_side_that_is_lost() -> None:
    """Fault J2: with the new store gone for good, the old one takes in again by force, and alone."""
    async with pair() as two:
        await two.publish("a")
        await start(two.both)
        two.weakness[1].down = True
        with pytest.raises(BackendUnavailable):
            await rollback(two.both)
        forced = await rollback(two.both, force=True)
        assert forced.phase is Phase.ROLLED_BACK
        assert await two.publish("b", through=two.old) == [ACCEPTED]
        assert await two.publish("a", "c", through=two.open()) == [DUPLICATE, ACCEPTED]


async def test_what_comes_late_is_not_kept_here() -> None:
    """A20: what a slow side brings after its receive has answered is given to the next one, or handed back."""
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
