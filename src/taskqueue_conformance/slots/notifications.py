"""The capability ``slots``: signals, concurrent callers, and several replicas of one pool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.slots.helpers import LONG, MODEL, OTHER_MODEL
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Left, SlotLease

T = TypeVar("T")


class SlotSignalsSuite(Harness, needs=(Capability.SLOTS,)):
    """Tests of `SlotPool.slot_signal`, and of concurrent calls."""

    async def test_a_released_slot_notifies(self, bench: Bench) -> None:
        """When a slot is released, a dispatcher that waits for the slot's model is notified at once (B7, C19)."""
        (lease,) = await bench.pool.serving("job-1")
        await _fires(bench, bench.slots.release(lease))
        (lease,) = await bench.pool.running("job-2")
        giving = bench.slots.acquire(MODEL, "h1", ttl=LONG, limit=0, releasing=[lease])
        await _fires(bench, giving)

    async def test_a_takeover_notifies(self, bench: Bench) -> None:
        """A takeover fires the signal, because it frees the newly acquired slot (B7, B8)."""
        await bench.pool.serving("job-1", slots=2)
        (fresh,) = await bench.pool.take()
        await _fires(bench, bench.pool.assign(fresh, "job-1"))

    async def test_new_room_notifies(self, bench: Bench) -> None:
        """A new or recovered endpoint, more slots, or the end of a pause fires the signal (B7, B10, C12, C19)."""
        await bench.pool.add()
        await _fires(bench, bench.pool.report(0))
        await bench.pool.running("job-1")
        await _fires(bench, bench.pool.add(slots=2))
        await _fires(bench, bench.pool.add("s2", reports=False))
        await bench.slots.drain(MODEL, "s2")
        await _fires(bench, bench.slots.drain(MODEL, "s2", draining=False))
        await bench.slots.rest(MODEL, "s2", LONG)
        await _fires(bench, bench.slots.rest(MODEL, "s2", 0))

    async def test_a_reconciled_slot_notifies(self, bench: Bench) -> None:
        """A slot that ``reconcile`` frees fires the signal (B7, C22)."""
        await bench.pool.serving("job-1")
        await bench.pool.report(0)
        await bench.advance(bench.short)
        await _fires(bench, bench.pool.report(0))

    async def test_a_slot_of_time_notifies(self, bench: Bench) -> None:
        """The first call that finds an expired lease fires the signal (B7)."""
        await bench.pool.serve()
        await bench.pool.take(ttl=bench.short)
        await bench.advance(bench.short)
        await _fires(bench, bench.slots.inspect())

    async def test_a_note_notifies(self, bench: Bench) -> None:
        """A note fires the signal, because the holder of the lease may be waiting only for the note (C7, C19)."""
        (lease,) = await bench.pool.serving("job-1")
        await _fires(bench, bench.slots.leave(MODEL, "job-1", lease.token, b"1"))

    async def test_room_of_a_shared_server_notifies(self, bench: Bench) -> None:
        """A released slot fires the signal of other models on the same server (B7, C2)."""
        await bench.pool.serve(slots=1, together=1)
        await bench.pool.serve(slots=1, model=OTHER_MODEL, together=1)
        (lease,) = await bench.pool.running("job-1")
        await _fires(bench, bench.slots.release(lease), OTHER_MODEL)

    async def test_idle_slots_of_a_shared_server_fire(self, bench: Bench) -> None:
        """The end of an unassigned lease fires the signal of other models on the same server (B7, C2, C12)."""
        await bench.pool.serve(model=OTHER_MODEL, together=1)
        verbs: list[Callable[[], Awaitable[object]]] = [
            lambda: bench.slots.drain(MODEL, "s1"),
            lambda: bench.slots.rest(MODEL, "s1", bench.short),
            lambda: bench.pool.report(None),
            lambda: bench.slots.remove(MODEL, "s1"),
        ]
        for verb in verbs:
            await bench.pool.serve(together=1)
            await bench.pool.take()
            await _fires(bench, verb(), OTHER_MODEL)
            await bench.slots.release(*await bench.pool.take(model=OTHER_MODEL))
            await bench.advance(bench.short)

    async def test_a_signal_of_several_models(self, bench: Bench) -> None:
        """A signal for several models fires for each of the models, whatever their names (B7; OPEN-C5)."""
        await bench.pool.serve()
        await bench.pool.serve(model=OTHER_MODEL)
        for model in (MODEL, OTHER_MODEL):
            (lease,) = await bench.pool.running("job-1", model=model)
            await _fires(bench, bench.slots.release(lease), MODEL, OTHER_MODEL)

    async def test_nothing_is_missed_between(self, bench: Bench) -> None:
        """A wait ends at once if something changed since the previous wait or since the signal was opened (B7, C19)."""
        await bench.pool.serve()
        async with bench.slots.slot_signal(MODEL) as signal:
            for number in range(4):
                await bench.slots.release(*await bench.pool.running(f"job-{number}"))
                await bench.outcome(await bench.start(signal.wait(LONG)))

    async def test_a_silent_signal_ends(self, bench: Bench) -> None:
        """If no slot becomes free, a wait lasts until its timeout; the signal does not keep firing (C19)."""
        await bench.pool.serving("job-1")
        async with bench.slots.slot_signal(MODEL) as signal:
            waiting = await bench.silent(signal, bench.short)
            await bench.advance(bench.short)
            await bench.outcome(waiting)

    async def test_many_want_the_same_slots(self, bench: Bench) -> None:
        """Many concurrent calls of ``acquire`` together get each slot exactly once (B6, C20; FIX-C4, fault H1)."""
        await bench.pool.serve("s1", 3)
        await bench.pool.serve("s2", 2)
        calls = [bench.slots.acquire(MODEL, f"h{n}", ttl=LONG, limit=2) for n in range(10)]
        given = [lease for answer in await asyncio.gather(*calls) for lease in answer]
        assert len(given) == len({lease.token for lease in given}) == 5
        for server in ("s1", "s2"):
            await bench.pool.expect(server, free=0)

    async def test_many_want_the_same_job(self, bench: Bench) -> None:
        """If many holders assign one job at once, one slot is kept and all other slots are freed (B8; fault H1)."""
        await bench.pool.serve(slots=6)
        calls = [bench.pool.assign(lease, "job-1") for lease in await bench.pool.take(6)]
        bound = await asyncio.gather(*calls)
        leases = await bench.slots.renew(*bound, ttl=LONG)
        assert sum(lease is not None for lease in leases) == 1, "a job must have one valid lease"
        await bench.pool.expect(held=1)

    async def test_a_cancelled_acquire_loses_nothing(self, bench: Bench) -> None:
        """A cancelled ``acquire`` keeps no slot for longer than the ttl (B7; fault H2)."""
        await bench.pool.serve(slots=3)
        for hops in range(6):
            acquire = bench.slots.acquire(MODEL, f"h{hops}", ttl=bench.short, limit=3)
            call = asyncio.ensure_future(acquire)
            for _ in range(hops):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await bench.hop(20)
        await bench.advance(bench.short)
        await bench.pool.expect(free=3)
        await bench.pool.take(3)

    async def test_a_crowd(self, bench: Bench) -> None:
        """Concurrent dispatchers never hold more slots than exist (B6; fault H1)."""
        await _crowd(bench, [bench])

    @needs("shared")
    async def test_replicas_race_for_slots(self, bench: Bench) -> None:
        """If several replicas acquire at once, each slot is granted once (C20; FIX-C4, fault H1)."""
        await bench.pool.serve(slots=5)
        replicas = [bench, await bench.replica(), await bench.replica()]
        calls = [
            index.slots.acquire(MODEL, f"h{n}", ttl=LONG) for n in range(4) for index in replicas
        ]
        given = [lease for answer in await asyncio.gather(*calls) for lease in answer]
        assert len(given) == len({lease.token for lease in given}) == 5

    @needs("shared")
    async def test_one_pool_for_all_replicas(self, bench: Bench) -> None:
        """A replica can see, take over and release leases of another replica (C23; OPEN-C4, fault H2)."""
        other = await bench.replica()
        (lease,) = await bench.pool.serving("job-1", slots=2)
        await other.pool.expect(usable=True)
        leaving = bench.slots.leave(MODEL, "job-1", lease.token, b"1")
        assert await _fires(other, leaving) is Left.TAKEN
        _, over = await other.pool.take_over()
        assert (over.resumed, over.note) == (True, b"1")
        await bench.pool.check_stale(lease)
        assert await _fires(other, bench.slots.release(over)) == (True,)

    @needs("shared")
    async def test_replicas_look_in_turn(self, bench: Bench) -> None:
        """Two reports without a job end its lease, even if they come from two replicas (C22; fault H4)."""
        other = await bench.replica()
        await bench.pool.serving("job-1")
        assert await bench.pool.report(0) == []
        assert await other.pool.report_twice(0) == ["job-1"]

    @needs("shared")
    async def test_a_crowd_of_replicas(self, bench: Bench) -> None:
        """Dispatchers on several replicas never hold more slots than exist (B6; fault H1)."""
        await _crowd(bench, [bench, await bench.replica(), await bench.replica()])

    @needs("durable")
    async def test_slots_survive(self, bench: Bench) -> None:
        """Endpoints, leases and documents survive a restart (C11, C20; OPEN-B1)."""
        (lease,) = await bench.pool.serving("job-1", slots=2)
        await bench.slots.configure(MODEL, b"1")
        before = await bench.pool.inspect()
        after = await bench.reopen()
        assert await after.pool.inspect() == before
        assert await after.slots.documents() == {MODEL: b"1"}
        assert await after.slots.release(lease) == (True,)


async def _fires(bench: Bench, event: Awaitable[T], *models: str) -> T:
    """Fail unless ``event`` fires the signal of ``models`` (default: `MODEL`); return the result of ``event``."""
    return await bench.fires(bench.slots.slot_signal(*(models or (MODEL,))), event)


async def _crowd(bench: Bench, replicas: list[Bench]) -> None:
    """Let concurrent holders acquire, bind, detach and release slots; fail if they ever hold too many slots."""
    slots = {"s1": 3, "s2": 2}
    for server, count in slots.items():
        await bench.pool.serve(server, count)
    held: dict[str, str] = {}

    async def hold(number: int, bench: Bench) -> None:
        drawn = random.Random(number)
        for turn in range(8):
            given = await bench.slots.acquire(MODEL, f"h{number}", ttl=LONG, limit=2)
            for lease in given:
                assert lease.token not in held, "a slot was granted twice"
                held[lease.token] = lease.server
                of_server = [name for name in held.values() if name == lease.server]
                assert len(of_server) <= slots[lease.server], "more slots are leased than exist"
            await _use(bench, given, f"{number}-{turn}", drawn)
            for lease in given:
                del held[lease.token]
            assert await bench.slots.release(*given) == (True,) * len(given)

    await asyncio.gather(*(hold(n, replica) for n, replica in enumerate(replicas * 3)))
    for server, count in slots.items():
        await bench.pool.expect(server, held=0, free=count)


async def _use(bench: Bench, given: tuple[SlotLease, ...], job: str, drawn: random.Random) -> None:
    pairs = [(lease, f"job-{job}-{index}") for index, lease in enumerate(given)]
    bound = await bench.slots.assign(*pairs, ttl=LONG)
    assert [lease and lease.token for lease in bound] == [lease.token for lease in given]
    if drawn.random() < 0.5:
        assert None not in await bench.slots.detach(*given, ttl=LONG)
    await bench.hop(drawn.randrange(3))
    assert None not in await bench.slots.renew(*given, ttl=LONG)
