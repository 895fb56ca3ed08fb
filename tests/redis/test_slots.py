"""The slot pool in Redis: its keys, its clock, its tokens, its signals, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from taskqueue_core.capabilities import Endpoint, Left, Permit, Seen, SlotLease
from taskqueue_core.clock import ManualClock
from taskqueue_redis import RedisBackend
from tests.chaos.proxy import FaultProxy
from tests.redis.backends import PATIENCE, keys_of, opened, until
from tests.redis.servers import RedisServer

MODEL = "llama 3.1 - {70b}: %s"


def endpoint(server: str = "s1", *, model: str = MODEL, slots: int = 2, **more: object) -> Endpoint:
    """Return an endpoint that needs no health reports and so is healthy at once."""
    fields: dict[str, object] = {"reports": False, **more}
    return Endpoint(model=model, server=server, url=f"http://{server}/", slots=slots, **fields)  # type: ignore[arg-type]


async def bound(backend: RedisBackend, *jobs: str, ttl: float = 60.0) -> list[SlotLease]:
    """Acquire a slot for each job and assign the jobs to them."""
    leases = await backend.slots.acquire(MODEL, "h", ttl=ttl, limit=len(jobs))
    told = await backend.slots.assign(*zip(leases, jobs, strict=True), ttl=ttl)
    found = [lease for lease in told if lease is not None]
    assert len(found) == len(jobs)
    return found


async def held(backend: RedisBackend, model: str | None = None) -> int:
    """Return the number of leased slots, which must equal the number of leases."""
    view = await backend.slots.inspect(model)
    number = sum(info.held for info in view.endpoints)
    assert number == len(view.leases)
    return number


@pytest.fixture
async def backend(redis_server: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend on the shared server."""
    async with opened(redis_server.url, redis_prefix) as found:
        yield found


async def test_all_of_it_is_in_the_first_partition(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """D18: all keys of the slot pool are in the first partition, whatever the models are called."""
    async with opened(redis_server.url, redis_prefix, partitions=4) as backend:
        for n in range(8):
            await backend.slots.register(endpoint(model=f"m{n}"))
            await backend.slots.configure(f"m{n}", b"{}")
            (lease,) = await backend.slots.acquire(f"m{n}", "h", ttl=60)
            await backend.slots.assign((lease, "job"), ttl=60)
            await backend.slots.leave(f"m{n}", "job", lease.token, b"1")
            await backend.slots.leave(f"m{n}", "job", "x", b"1")
        keys = {key for key in keys_of(redis_server, redis_prefix) if ":slots" in key}
        assert {key.partition("}:")[0] for key in keys} == {f"{{{redis_prefix}:0"}
        assert len((await backend.slots.inspect()).endpoints) == 8


async def test_names_are_distinguished(backend: RedisBackend) -> None:
    """C23: models and servers may have any names; names that are ambiguous when joined are still distinguished."""
    names = ["a", "ab", "1:a", "a:1", "%d+", "j", "ü {x}:*", "s1", "epoch", "fence", "0", "12"]
    for model in names:
        for server in names:
            await backend.slots.register(endpoint(server, model=model, slots=1))
    for model in names:
        leases = await backend.slots.acquire(model, "h", ttl=60, limit=1000)
        assert sorted(lease.server for lease in leases) == sorted(names)
        jobs = [f"j{n}" for n, _ in enumerate(leases)]
        assert None not in await backend.slots.assign(*zip(leases, jobs, strict=True), ttl=60)
    view = await backend.slots.inspect()
    assert {(one.endpoint.model, one.endpoint.server, one.held) for one in view.endpoints} == {
        (model, server, 1) for model in names for server in names
    }
    assert [one.endpoint.model for one in view.endpoints] == sorted(names * len(names))
    for model in names:
        for server in names:
            assert await backend.slots.remove(model, server)
    assert await held(backend) == len(names) ** 2


async def test_jobs_of_models_are_distinguished(backend: RedisBackend) -> None:
    """C23: jobs of different models are distinct, even with the same id."""
    leases: list[SlotLease | None] = []
    for model, job in (("a", "1"), ("a1", "1"), ("a", "11")):
        await backend.slots.register(endpoint(model=model))
        (lease,) = await backend.slots.acquire(model, "h", ttl=60)
        leases += await backend.slots.assign((lease, job), ttl=60)
    assert [lease.resumed for lease in leases if lease] == [False, False, False]


async def test_the_time_is_the_stores(
    backend: RedisBackend, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4: leases expire by the clock of the store, not by that of a process."""
    monkeypatch.setattr("time.time", lambda: 1.0)
    await backend.slots.register(endpoint())
    (lease,) = await backend.slots.acquire(MODEL, "h", ttl=60)
    second, part = redis_server.call("TIME")
    assert 59 < lease.expires_at - int(second) - int(part) / 1e6 <= 60
    (short,) = await backend.slots.acquire(MODEL, "h", ttl=0.05)

    async def gone() -> bool:
        return await held(backend) == 1

    await until(gone, "it runs out")
    assert await backend.slots.release(short, lease) == (False, True)


async def test_tokens_tell_nothing_of_each_other(backend: RedisBackend) -> None:
    """C23: a token cannot be derived from another one, because each has its own secret."""
    await backend.slots.register(endpoint(slots=100))
    leases = await backend.slots.acquire(MODEL, "h", ttl=60, limit=100)
    secrets = {lease.token.rpartition(".")[2].partition("x")[2] for lease in leases}
    assert len(secrets) == 100
    assert {len(secret) for secret in secrets} == {32}
    (first, second, *_) = leases
    head, _, tail = first.token.rpartition(".")
    forged = f"{head.rpartition('.')[0]}.{second.fence}.{tail}"
    assert await backend.slots.leave(MODEL, "j", forged, b"1") is Left.LATE
    for token in ("", "x", "..", f"{first.token}x", first.token.upper(), "é.1.1x1", "\ud800.1.1"):
        assert await backend.slots.release(altered(first, token)) == (False,)
    assert await held(backend) == 100


def altered(lease: SlotLease, token: str) -> SlotLease:
    """Return a lease with another token."""
    return SlotLease(
        model=lease.model, server=lease.server, url=lease.url, holder=lease.holder, token=token,
        fence=lease.fence, state=lease.state, job=lease.job, expires_at=lease.expires_at,
    )  # fmt: skip


async def test_nothing_is_left_behind(redis_server: RedisServer, redis_prefix: str) -> None:
    """Rule 5: after all leases and endpoints were removed, the store has no more keys than before.

    Only counters of the pool and recent late notes are kept.
    """
    clock = ManualClock(1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        await backend.slots.inspect()
        before = keys_of(redis_server, redis_prefix)
        fields = set(redis_server.call("HKEYS", f"{{{redis_prefix}:0}}:slots"))
        for turn in range(3):
            for n in range(3):
                await backend.slots.register(endpoint(f"s{n}", together=3))
            one, two, three, four = await bound(backend, *(f"j{turn}-{n}" for n in range(4)))
            await backend.slots.leave(MODEL, one.job or "", one.token, b"1")
            await backend.slots.detach(two, ttl=1)
            await backend.slots.leave(MODEL, "j", "late", b"1")
            (last,) = await backend.slots.acquire(MODEL, "h", ttl=60)
            (resumed,) = await backend.slots.assign((last, three.job or ""), ttl=60)
            assert resumed is not None
            await backend.slots.acquire(MODEL, "h", ttl=1)
            assert await backend.slots.release(one, resumed, four) == (True,) * 3
            for n in range(3):
                assert await backend.slots.remove(MODEL, f"s{n}")
            await clock.advance(3600)
            assert (await backend.slots.inspect()).endpoints == ()
            await backend.slots.configure(MODEL, b"{}")
            await backend.slots.configure(MODEL, None)
            await backend.slots.leave(MODEL, "other", "late", b"1")
            await clock.advance(3600)
        await backend.slots.leave(MODEL, "last", "late", b"1")
        left = keys_of(redis_server, redis_prefix) - before
        assert left == {f"{{{redis_prefix}:0}}:slots:{name}" for name in ("late", "dates")}
        assert redis_server.call("ZCARD", f"{{{redis_prefix}:0}}:slots:dates") == 1
        assert set(redis_server.call("HKEYS", f"{{{redis_prefix}:0}}:slots")) == fields


async def test_so_many_at_once(redis_server: RedisServer, redis_prefix: str) -> None:
    """Rule 5, C23: many leases that expire together are removed in steps, but all of them are invalid at once."""
    clock = ManualClock(1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        await backend.slots.register(endpoint(slots=2500))
        leases: list[SlotLease] = []
        for _ in range(3):
            leases += await backend.slots.acquire(MODEL, "h", ttl=1, limit=1000)
        assert len(leases) == 2500
        await clock.advance(1)
        # No maintenance pass has removed this expired lease yet, but it is invalid already.
        assert await backend.slots.release(leases[-1]) == (False,)
        assert len(await backend.slots.acquire(MODEL, "h", ttl=1, limit=1000)) == 1000
        await clock.advance(1)
        assert await held(backend) == 0


async def test_idle_slots_behind_ones_own(redis_server: RedisServer, redis_prefix: str) -> None:
    """C23: idle slots of other holders are found even behind many slots of one's own."""
    clock = ManualClock(1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        await backend.slots.register(endpoint(slots=255))
        mine = await backend.slots.acquire(MODEL, "me", ttl=60, limit=250)
        await clock.advance(1)
        theirs = await backend.slots.acquire(MODEL, "they", ttl=60, limit=10)
        await clock.advance(1)
        taken = await backend.slots.acquire(MODEL, "me", ttl=60, limit=10, idle=0.5)
        assert len(theirs) == len(taken) == 5
        assert await backend.slots.release(*theirs) == (False,) * 5
        assert await backend.slots.release(*mine) == (True,) * 250


async def test_a_note_for_who_gives_back_is_dropped(backend: RedisBackend) -> None:
    """C23: a holder that exchanges its slot has read its note, so the note is not kept."""
    await backend.slots.register(endpoint())
    (lease,) = await bound(backend, "j")
    assert await backend.slots.leave(MODEL, "j", lease.token, b"1") is Left.TAKEN
    assert await backend.slots.acquire(MODEL, "h", ttl=60, releasing=[lease])
    assert await backend.slots.late(MODEL, "j") == ()


async def test_a_slot_signal_in_another_process(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """C23: a slot freed in one process wakes waiters in another one; each model has its own signal."""
    async with (
        opened(redis_server.url, redis_prefix) as one,
        opened(redis_server.url, redis_prefix) as two,
    ):
        for model in (MODEL, "other"):
            await one.slots.register(endpoint(model=model, slots=1))
        (lease,) = await one.slots.acquire(MODEL, "h", ttl=60)
        (other,) = await one.slots.acquire("other", "h", ttl=60)
        async with (
            two.slots.slot_signal(MODEL) as signal,
            two.slots.slot_signal("other", "more") as quiet,
        ):
            ringing = asyncio.create_task(signal.wait(2 * PATIENCE))
            silence = asyncio.create_task(quiet.wait(2 * PATIENCE))
            await one.slots.release(lease)
            await asyncio.wait_for(ringing, PATIENCE)
            assert not silence.done()
            await one.slots.release(other)
            await asyncio.wait_for(silence, PATIENCE)


async def test_a_slot_signal_that_may_have_missed_a_message(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """BUG-D3, fault B2: a slot signal fires when its lost connection is restored, as it may have missed a message."""
    async with FaultProxy(("127.0.0.1", redis_server.port)) as proxy:
        url = f"redis://127.0.0.1:{proxy.address[1]}"
        async with opened(url, redis_prefix) as backend, backend.slots.slot_signal(MODEL) as signal:
            ringing = asyncio.create_task(signal.wait(2 * PATIENCE))
            await asyncio.sleep(0)
            assert proxy.cut()
            await asyncio.wait_for(ringing, PATIENCE)


async def test_slot_and_room_signals_are_separate(backend: RedisBackend) -> None:
    """Slot signals and room signals of the same name are independent."""
    name = "work"
    await backend.slots.register(endpoint(model=name))
    (lease,) = await backend.slots.acquire(name, "h", ttl=60)
    async with (
        backend.publisher.room_signal(name) as room,
        backend.slots.slot_signal(name) as slots,
    ):
        waiting = asyncio.create_task(room.wait(2 * PATIENCE))
        ringing = asyncio.create_task(slots.wait(2 * PATIENCE))
        await backend.slots.release(lease)
        await asyncio.wait_for(ringing, PATIENCE)
        assert not waiting.done()
        await backend.control.configure(name, await backend.control.settings(name))
        await asyncio.wait_for(waiting, PATIENCE)


async def test_what_a_server_says_it_runs_may_be_anything(backend: RedisBackend) -> None:
    """Fault H5: job names reported by a server that are no valid names are ignored."""
    await backend.slots.register(endpoint(reports=True))
    await backend.slots.reconcile(MODEL, "s1", Seen(active=0), settled=0)
    (lease,) = await bound(backend, "j")
    strange = frozenset({"\ud800", "x" * 100_000, "", "j "})
    assert await backend.slots.reconcile(MODEL, "s1", Seen(active=4, jobs=strange), settled=0) == ()
    (ended,) = await backend.slots.reconcile(MODEL, "s1", Seen(active=4, jobs=strange), settled=0)
    assert (ended.fence, ended.state, ended.token) == (lease.fence, Permit.ASSIGNED, "")
