"""The slot pool under faults: lost answers, cancelled calls, a full or emptied store, and deleted keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from taskqueue_core.capabilities import Left, Permit, Seen, SlotLease
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable
from taskqueue_redis.connection.errors import QueueReset
from tests.redis.backends import keys_of, opened, until
from tests.redis.conftest import MakeServer
from tests.redis.engines import Engine
from tests.redis.servers import RedisServer
from tests.redis.test_answers_lost import at_each_point, cancelled_at, lossy
from tests.redis.test_slots import MODEL, bound, endpoint, held

POOL = ("", ":e:1", ":e:1:u", ":e:2", ":e:2:u", ":jobs", ":lapses", ":notes", ":late", ":dates")
"""the keys of a pool with two endpoints, after the common prefix"""


@pytest.mark.oldest
async def test_lost_answers_of_acquire(each_redis: RedisServer, redis_prefix: str) -> None:
    """C23, fault E3: if the answer of ``acquire`` is lost, the retry returns the same leases and grants no others."""
    async with lossy(each_redis, redis_prefix) as (proxy, backend, other):
        await backend.slots.register(endpoint(slots=5))
        (before,) = await backend.slots.acquire(MODEL, "h", ttl=60)
        proxy.lose_replies(1, after=b"EVALSHA")
        leases = await backend.slots.acquire(MODEL, "h", ttl=60, limit=2, releasing=[before])
        assert proxy.losing == 0
        assert len(leases) == await held(other) == 2
        assert await other.slots.release(before) == (False,)
        proxy.lose_replies(2, after=b"EVALSHA")
        more = await backend.slots.acquire(MODEL, "h", ttl=60, limit=10)
        assert len(more) == 3
        assert len({lease.token for lease in (*leases, *more)}) == await held(other) == 5
        told = await other.slots.renew(*leases, *more, ttl=60)
        assert [lease and lease.token for lease in told] == [
            lease.token for lease in (*leases, *more)
        ]
        proxy.lose_replies(1, after=b"EVALSHA")
        assert await backend.slots.acquire(MODEL, "h", ttl=60) == ()
        proxy.lose_replies(1, after=b"EVALSHA")
        (mine,) = await backend.slots.acquire(MODEL, "h", ttl=60, releasing=leases[:1])
        assert mine.token not in {lease.token for lease in (*leases, *more)}
        assert await held(other) == 5


async def test_lost_answers_of_assign(each_redis: RedisServer, redis_prefix: str) -> None:
    """C23, fault E3: if the answer of a takeover is lost, the retry returns its lease to the new holder only."""
    async with lossy(each_redis, redis_prefix) as (proxy, backend, other):
        await backend.slots.register(endpoint(slots=3))
        (first,) = await bound(other, "j")
        (lease,) = await backend.slots.acquire(MODEL, "me", ttl=60)
        proxy.lose_replies(1, after=b"EVALSHA")
        (resumed,) = await backend.slots.assign((lease, "j"), ttl=60)
        assert resumed is not None
        assert (resumed.resumed, resumed.holder) == (True, "me")
        assert await held(other) == 1
        assert await other.slots.release(first, lease) == (False, False)
        # Another call with the same lease gets the same answer.
        (again,) = await other.slots.assign((lease, "j"), ttl=60)
        assert again is not None
        assert again.token == resumed.token
        assert await other.slots.assign((first, "j"), ttl=60) == (None,)
        assert await other.slots.assign((lease, "k"), ttl=60) == (None,)


async def test_lost_answers_of_the_others(each_redis: RedisServer, redis_prefix: str) -> None:
    """Fault E3: if the answer of any other slot call is lost, its retry has the same result and no further effect."""
    async with lossy(each_redis, redis_prefix) as (proxy, backend, other):
        slots = backend.slots

        async def unheard(call: Callable[[], Awaitable[Any]]) -> Any:
            proxy.lose_replies(1, after=b"EVALSHA")
            told = await call()
            assert proxy.losing == 0
            return told

        assert (await unheard(lambda: slots.register(endpoint()))).endpoint == endpoint()
        first, second = await bound(other, "1", "2")
        (kept,) = await unheard(lambda: slots.renew(first, ttl=100))
        assert (kept.token, kept.state) == (first.token, Permit.ASSIGNED)
        (away,) = await unheard(lambda: slots.detach(first, ttl=100))
        assert (away.token, away.state) == (first.token, Permit.DETACHED)
        assert await unheard(lambda: slots.leave(MODEL, "1", away.token, b"1")) is Left.TAKEN
        assert await unheard(lambda: slots.leave(MODEL, "1", "x", b"2")) is Left.LATE
        assert await unheard(lambda: slots.late(MODEL, "1")) == (b"2",)
        assert await slots.leave(MODEL, "1", "x", b"2") is Left.LATE
        assert await slots.late(MODEL, "1") == (b"2", b"2")
        (third,) = (await unheard(slots.inspect)).leases[:1]
        assert third.fence == first.fence
        await unheard(lambda: slots.release(second))
        assert await held(other) == 1
        assert await unheard(lambda: slots.drain(MODEL, "s1"))
        assert await unheard(lambda: slots.rest(MODEL, "s1", 5))
        assert await unheard(lambda: slots.remove(MODEL, "s1"))
        await unheard(lambda: slots.configure(MODEL, b"{}"))
        assert await unheard(slots.documents) == {MODEL: b"{}"}


async def test_lost_answers_of_reconcile(each_redis: RedisServer, redis_prefix: str) -> None:
    """Faults E3 and H4: an observation whose answer was lost counts once, so it never confirms itself."""
    async with lossy(each_redis, redis_prefix) as (proxy, backend, other):
        await backend.slots.register(endpoint(reports=True))
        await backend.slots.reconcile(MODEL, "s1", Seen(active=0), settled=0)
        await bound(backend, "j")
        proxy.lose_replies(1, after=b"EVALSHA")
        with pytest.raises(BackendUnavailable, match="response was lost"):
            await backend.slots.reconcile(MODEL, "s1", Seen(active=0), settled=0)
        assert await held(other) == 1
        assert len(await backend.slots.reconcile(MODEL, "s1", Seen(active=0), settled=0)) == 1


async def test_a_cancelled_acquire(redis_server: RedisServer, redis_prefix: str) -> None:
    """Law 10, fault E4: slots taken by a cancelled ``acquire`` are released at once, wherever it was cancelled."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await backend.slots.register(endpoint())

        async def case(point: int, *, late: bool) -> bool:
            outcome = await cancelled_at(
                backend.slots.acquire(MODEL, "h", ttl=3600, limit=2), point, late=late
            )
            if outcome.answer:
                await backend.slots.release(*outcome.answer)

            async def all_free() -> bool:
                return await held(backend) == 0

            await until(all_free, "they come back")
            return outcome.reached

        assert await at_each_point(case) >= 1


async def test_without_memory(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str
) -> None:
    """E6, fault B8: without memory, new endpoints, documents and notes are refused; all other slot calls work."""
    with make_server(each_engine) as server:
        async with opened(server.url, redis_prefix) as backend:
            slots = backend.slots
            await slots.register(endpoint())
            await slots.register(endpoint("s2", reports=True))
            await slots.reconcile(MODEL, "s2", Seen(active=0), settled=0)
            await slots.inspect()
            server.call("CONFIG", "SET", "maxmemory", "1")
            before = await slots.inspect()
            for refused in (
                lambda: slots.register(endpoint("s3")),
                lambda: slots.configure(MODEL, b"{}"),
                lambda: slots.leave(MODEL, "j", "x", b"1"),
            ):
                with pytest.raises(BackendUnavailable, match="accepts no writes: OOM"):
                    await refused()
            assert await slots.inspect() == before
            one, two, three, four = await bound(backend, "1", "2", "3", "4")
            assert None not in await slots.renew(one, two, ttl=60)
            assert None not in await slots.detach(two, ttl=60)
            assert await slots.release(three) == (True,)
            (last,) = await slots.acquire(MODEL, "h", ttl=60, releasing=[four], limit=1)
            (resumed,) = await slots.assign((last, "1"), ttl=60)
            assert resumed is not None
            assert await slots.late(MODEL, "1") == ()
            assert await slots.release(one, resumed) == (False, True)
            lost = SlotLease(
                model=MODEL, server="s2", url="http://s2/", holder="h", token="earlier.1.1", fence=1,
                state=Permit.ASSIGNED, job="earlier", expires_at=0.0,
            )  # fmt: skip
            (anew,) = await slots.renew(lost, ttl=60)
            assert anew is not None
            for _ in range(2):
                await slots.reconcile(MODEL, "s2", Seen(active=0), settled=0)
            assert await slots.documents() == {}
            assert await slots.drain(MODEL, "s1")
            assert await slots.rest(MODEL, "s1", 1)
            await slots.release(two)
            assert await held(backend) == 0
            assert await slots.remove(MODEL, "s1")
            assert len((await slots.inspect()).endpoints) == 1
            server.call("CONFIG", "SET", "maxmemory", "0")
            await slots.register(endpoint())


async def test_an_emptied_store(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str
) -> None:
    """Faults H9 and B12: after FLUSHALL one call per process reports it; then running jobs get their slots back.

    A token of the lost pool releases no slot, and fences continue to rise.
    """
    with make_server(each_engine) as server:
        async with (
            opened(server.url, redis_prefix) as backend,
            opened(server.url, redis_prefix) as other,
        ):
            await backend.slots.register(endpoint())
            epoch = (await other.slots.inspect()).epoch
            first, second = await bound(backend, "1", "2")
            server.call("FLUSHALL")
            with pytest.raises(QueueReset):
                await backend.slots.renew(first, second, ttl=60)
            assert await backend.slots.renew(first, second, ttl=60) == (None, None)
            with pytest.raises(QueueReset):
                await other.slots.inspect()
            view = await other.slots.inspect()
            assert view.endpoints == ()
            assert view.epoch not in ("", epoch)
            await backend.slots.register(endpoint(slots=1))
            assert await backend.slots.release(first) == (False,)
            (stranger,) = await other.slots.acquire(MODEL, "other", ttl=60)
            anew = await backend.slots.renew(first, second, ttl=60)
            fences = [first.fence, second.fence, stranger.fence]
            fences += [lease.fence for lease in anew if lease]
            assert fences == sorted(set(fences))
            assert len(fences) == 5
            assert [lease and (lease.job, lease.holder) for lease in anew] == [
                ("1", "h"),
                ("2", "h"),
            ]
            # Three leases exceed the one slot of the endpoint, but all three jobs may be running.
            assert await held(other) == 3
            again = await backend.slots.renew(first, second, ttl=1)
            assert [lease and lease.token for lease in again] == [
                lease and lease.token for lease in anew
            ]
            assert await held(other) == 3


async def test_the_pool_alone_is_deleted(redis_server: RedisServer, redis_prefix: str) -> None:
    """Fault H9: if only the keys of the pool are deleted, no call fails, and the pool gets a new epoch."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await backend.slots.register(endpoint())
        await backend.slots.configure(MODEL, b"{}")
        (lease,) = await bound(backend, "1")
        (idle,) = await backend.slots.acquire(MODEL, "h", ttl=60)
        before = await backend.slots.inspect()
        pool = [key for key in keys_of(redis_server, redis_prefix) if ":slots" in key]
        redis_server.call("DEL", *pool)
        view = await backend.slots.inspect()
        assert (view.epoch != before.epoch, view.endpoints, view.leases) == (True, (), ())
        assert view.secret != before.secret
        assert await backend.slots.release(lease, idle) == (False, False)
        await backend.slots.register(endpoint())
        anew, none = await backend.slots.renew(lease, idle, ttl=60)
        assert none is None
        assert anew is not None
        assert anew.fence > idle.fence
        assert (await backend.health()).details["resets"] == 0


@pytest.mark.parametrize("key", POOL)
@pytest.mark.parametrize("reports", [True, False])
async def test_a_foreign_hand(
    redis_server: RedisServer, redis_prefix: str, key: str, *, reports: bool
) -> None:
    """C23, fault H9: if any key of the pool is deleted, no call fails, no slot is lost, and none has two holders."""
    clock = ManualClock(1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        slots = backend.slots

        async def registered() -> None:
            for server in ("s1", "s2"):
                await slots.register(endpoint(server, slots=3, reports=reports))
                await slots.reconcile(MODEL, server, Seen(active=0), settled=0)

        await registered()
        jobs = await bound(backend, "1", "2", "3", ttl=10)
        idle = await slots.acquire(MODEL, "h", ttl=10, limit=2)
        await slots.leave(MODEL, "1", jobs[0].token, b"1")
        await slots.leave(MODEL, "2", "x", b"2")
        assert redis_server.call("DEL", f"{{{redis_prefix}:0}}:slots{key}") == 1
        await registered()
        for _ in range(2):
            assert await slots.acquire(MODEL, "h", ttl=1, limit=6)
            view = await slots.inspect()
            assert all(info.held <= 3 for info in view.endpoints)
            await clock.advance(1)
        await slots.renew(*jobs, *idle, ttl=1)
        await slots.late(MODEL, "2")
        for n in range(10):
            await slots.leave(MODEL, "2", "x", b"%d" % n)
        await clock.advance(3600)
        view = await slots.inspect()
        for info in view.endpoints:
            for _ in range(2):
                await slots.reconcile(MODEL, info.endpoint.server, Seen(active=0), settled=0)
        assert await held(backend) == 0
        leases = await slots.acquire(MODEL, "h", ttl=10, limit=10)
        assert len(leases) == len({lease.token for lease in leases}) == 6
        told = await slots.assign(*((lease, f"again-{lease.fence}") for lease in leases), ttl=10)
        assert None not in told
        assert await slots.release(*leases) == (True,) * 6
        assert len(await slots.late(MODEL, "2")) <= 8


@pytest.mark.parametrize("reports", [True, False])
async def test_the_jobs_are_forgotten(
    redis_server: RedisServer, redis_prefix: str, *, reports: bool
) -> None:
    """C23, fault H9: if the index of jobs is lost, ``inspect`` rebuilds it from the leases."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await backend.slots.register(endpoint(slots=3, reports=reports))
        await backend.slots.reconcile(MODEL, "s1", Seen(active=0), settled=0)
        (first,) = await bound(backend, "j")
        redis_server.call("DEL", f"{{{redis_prefix}:0}}:slots:jobs")
        await backend.slots.inspect()
        (lease,) = await backend.slots.acquire(MODEL, "h", ttl=60)
        (resumed,) = await backend.slots.assign((lease, "j"), ttl=60)
        assert resumed is not None
        assert resumed.resumed
        assert await backend.slots.release(first) == (False,)
        assert await held(backend) == 1
