"""A stand-in for a dispatcher: leases, assigns, renews, releases and abandons slots at random, and logs each call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import SecretStr

from taskqueue_core.capabilities import PoolView, Seen, SlotLease
from taskqueue_core.errors import BackendUnavailable
from taskqueue_redis import RedisBackend, RedisSettings
from tests.chaos.slot_history import IDLE, LEASE, PLACES, SETTLED, Call, Held, Place

_HANDS = 6
_RUN = 0.2
"""maximum seconds for which a job runs"""
_SHARED = 8
"""number of job names that several leasers use"""
_GPU = "{gpu}"


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a leaser process."""

    name: str
    url: str
    prefix: str
    log: str
    seed: int


def settings_of(url: str, prefix: str) -> RedisSettings:
    """Return the Redis settings that all processes of a run use."""
    return RedisSettings(
        url=SecretStr(url), prefix=prefix, operation_timeout=5.0, answer_timeout=2.0, _env_file=None
    )


async def running(backend: RedisBackend, place: Place) -> frozenset[str]:
    """Return the jobs that a simulated server runs now: those sent to it that have not ended."""
    told = await backend._context.client.command(
        _GPU, "HGETALL", f"{_GPU}:{place.model}:{place.server}"
    )
    now = time.time()
    jobs = zip(told[::2], told[1::2], strict=True)
    return frozenset(job.decode() for job, end in jobs if float(end) > now)


def perform(orders: Orders) -> None:
    """Run a leaser until SIGTERM; slots that it holds then stay leased."""
    with Path(f"{orders.log}.out").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            asyncio.run(_run(orders))
        except BaseException:  # noqa: BLE001 - the test reads the traceback from the output file
            traceback.print_exc()
            sys.exit(1)


async def _run(orders: Orders) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    backend = RedisBackend(settings=settings_of(orders.url, orders.prefix))
    async with contextlib.aclosing(backend), asyncio.TaskGroup() as group:
        leaser = _Leaser(orders, backend, over)
        for _ in range(_HANDS):
            group.create_task(leaser.again(leaser.lease))
        group.create_task(leaser.again(leaser.reconcile))
        group.create_task(leaser.again(leaser.look))


class _Leaser:
    def __init__(self, orders: Orders, backend: RedisBackend, over: asyncio.Event) -> None:
        self._name = orders.name
        self._backend = backend
        self._slots = backend.slots
        self._over = over
        self._chance = random.Random(orders.seed)
        self._log = os.open(orders.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._numbers = 0

    async def again(self, act: Callable[[], Awaitable[None]]) -> None:
        """Repeat an action until told to stop."""
        while not self._over.is_set():
            # The process was frozen for longer than the answer timeout.
            with contextlib.suppress(BackendUnavailable):
                await act()

    async def lease(self) -> None:
        """Lease some slots, then release, exchange, use, or abandon them at random."""
        chance = self._chance
        model = chance.choice(PLACES).model
        leases = await self._acquire(model, chance.randint(1, 4))
        if not leases:
            await asyncio.sleep(0.01 * chance.random())
            return
        fate = chance.random()
        if fate < 0.3:
            await self._release(leases)
        elif fate < 0.45:
            more = await self._acquire(model, chance.randint(1, 4), releasing=leases)
            await self._release(more)
        elif fate < 0.47:
            await asyncio.sleep(max(0.0, leases[0].expires_at - time.time()) + 0.01)
            await self._keep(leases)  # the leases have expired by now
        elif fate < 0.98:
            await self._work(leases)
        # Otherwise abandon the leases.

    async def _work(self, leases: Sequence[SlotLease]) -> None:
        chance = self._chance
        bound = await self._assign([(lease, self._job()) for lease in leases])
        for lease in bound:
            end = time.time() + _RUN * chance.random()
            await self._gpu("HSET", lease, lease.job or "", f"{end:.6f}")
        if chance.random() < 0.5:
            bound = await self._keep(bound, away=chance.random() < 0.5)
        await asyncio.sleep(0.01 * chance.random())
        if chance.random() < 0.93:
            for lease in bound:
                if not (lease.job or "").startswith("shared"):  # another leaser may run that
                    await self._gpu("HDEL", lease, lease.job or "")
            await self._release(bound)
        # Otherwise abandon the leases, as a process that dies does.

    def _job(self) -> str:
        if self._chance.random() < 0.1:
            return f"shared-{self._chance.randrange(_SHARED)}"
        self._numbers += 1
        return f"{self._name}-{self._numbers}"

    async def _gpu(self, verb: str, lease: SlotLease, *words: str) -> None:
        key = f"{_GPU}:{lease.model}:{lease.server}"
        await self._backend._context.client.command(_GPU, verb, key, *words)

    async def reconcile(self) -> None:
        """Report to the pool which jobs a server runs."""
        chance = self._chance
        await asyncio.sleep(0.03 * chance.random())
        place = chance.choice(PLACES)
        if not place.reports:
            return
        jobs = await running(self._backend, place)
        told = chance.random()
        seen = Seen(active=len(jobs), jobs=jobs if told < 0.6 else None) if told < 0.95 else None
        async with self._call("reconcile", place=place, silent=seen is None) as call:
            ended = await self._slots.reconcile(place.model, place.server, seen, settled=SETTLED)
            call.told = [_held(lease) for lease in ended]
            if seen is not None and seen.jobs is not None:
                call.faults += [f"ended {one.job}, which runs" for one in ended if one.job in jobs]

    async def look(self) -> None:
        """Inspect the pool and record if its numbers are inconsistent."""
        await asyncio.sleep(0.02 * self._chance.random())
        model = self._chance.choice([None, *{place.model for place in PLACES}])
        async with self._call("look") as call:
            call.faults += _faults(await self._slots.inspect(model))

    # Wrappers around each call: record its arguments before it is sent, and its answer afterwards.

    async def _acquire(
        self, model: str, limit: int, *, releasing: Sequence[SlotLease] = ()
    ) -> Sequence[SlotLease]:
        idle = IDLE if self._chance.random() < 0.2 else None
        async with self._call("acquire", releasing) as call:
            leases = await self._slots.acquire(
                model, self._name, ttl=LEASE, limit=limit, releasing=releasing, idle=idle
            )
            call.told = [_held(lease) for lease in leases]
        return leases

    async def _assign(self, pairs: Sequence[tuple[SlotLease, str]]) -> list[SlotLease]:
        leases, jobs = [lease for lease, _ in pairs], [job for _, job in pairs]
        async with self._call("assign", leases, jobs=jobs) as call:
            told = await self._slots.assign(*pairs, ttl=LEASE)
            call.told = [_held(lease) for lease in told]
        return [lease for lease in told if lease is not None]

    async def _keep(self, leases: Sequence[SlotLease], *, away: bool = False) -> list[SlotLease]:
        async with self._call("detach" if away else "renew", leases) as call:
            verb = self._slots.detach if away else self._slots.renew
            told = await verb(*leases, ttl=LEASE)
            call.told = [_held(lease) for lease in told]
        return [lease for lease in told if lease is not None]

    async def _release(self, leases: Sequence[SlotLease]) -> None:
        async with self._call("release", leases) as call:
            call.released = list(await self._slots.release(*leases))

    @contextlib.asynccontextmanager
    async def _call(
        self,
        what: str,
        leases: Sequence[SlotLease] = (),
        *,
        place: Place | None = None,
        **more: Any,
    ) -> AsyncIterator[Call]:
        self._numbers += 1
        call = Call(
            name=f"{self._name}.{self._numbers}", what=what, asked=time.time(),
            fences=[lease.fence for lease in leases],
            model=place.model if place else "", server=place.server if place else "", **more,
        )  # fmt: skip
        self._note(call)
        yield call
        call.answered = time.time()
        self._note(call)

    def _note(self, call: Call) -> None:
        os.write(self._log, msgspec.json.encode(call) + b"\n")


def _held(lease: SlotLease | None) -> Held | None:
    if lease is None:
        return None
    return Held(
        fence=lease.fence, model=lease.model, server=lease.server, job=lease.job,
        expires_at=lease.expires_at, resumed=lease.resumed,
    )  # fmt: skip


def _faults(view: PoolView) -> list[str]:
    faults = [
        f"{info.held} held and {info.free} free of {info.endpoint.slots} slots"
        for info in view.endpoints
        if info.held > info.endpoint.slots or info.held + info.free != info.endpoint.slots
    ]
    if sum(info.held for info in view.endpoints) != len(view.leases):
        faults.append("another number of leases is held than there are")
    jobs = [(lease.model, lease.job) for lease in view.leases if lease.job is not None]
    if len(set(jobs)) != len(jobs):
        faults.append("a job has two leases")
    if len({lease.fence for lease in view.leases}) != len(view.leases):
        faults.append("two leases have one fence")
    return faults
