"""Slots under faults: dispatchers are killed, frozen and late, while the pool must grant no slot twice."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from taskqueue_core.capabilities import Endpoint, Seen, SlotLease
from taskqueue_redis import RedisBackend
from tests.chaos.cases import CHAOS, LONG
from tests.chaos.programs.leaser import Orders, perform, running, settings_of
from tests.chaos.slot_history import (
    LEASE,
    PLACES,
    SETTLED,
    TOGETHER,
    Call,
    Figures,
    Held,
    Place,
    check,
    read,
)
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

_LEASERS = 3
_PATIENCE = 60.0
_SLACK = 1.0
"""extra seconds allowed on a busy machine"""
_nursery = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload(["tests.chaos.programs.leaser"])


class Run:
    """Leasers on one store, which are killed and frozen at random until enough slots were granted."""

    def __init__(self, folder: Path, backend: RedisBackend, url: str, seed: int) -> None:
        self.backend = backend
        self.killed = self.frozen = 0
        self._folder = folder
        self._url = url
        self._chance = random.Random(seed)
        self._starts = 0
        self._leasers: list[BaseProcess] = []

    async def register(self) -> None:
        """Register all endpoints and report them as healthy."""
        for place in PLACES:
            await self.backend.slots.register(
                Endpoint(
                    model=place.model, server=place.server, url="http://gpu/", slots=place.slots,
                    reports=place.reports, together=TOGETHER if place.server == "both" else None,
                )
            )  # fmt: skip
            await self.backend.slots.reconcile(place.model, place.server, Seen(active=0), settled=0)

    async def rage(self, grants: int) -> None:
        """Kill and freeze leasers until ``grants`` slots were granted and at least three of each fault happened."""
        self._leasers = [self._start() for _ in range(_LEASERS)]
        first = await self._fence()
        end = time.monotonic() + _PATIENCE + grants / 200
        while await self._fence() - first < grants or self.killed < 3 or self.frozen < 3:
            assert time.monotonic() < end, (
                f"{await self._fence() - first} slots granted: no progress"
            )
            await asyncio.sleep(0.2 * self._chance.random())
            number = self._chance.randrange(_LEASERS)
            leaser = self._leasers[number]
            if self._chance.random() < 0.5:
                _signal(leaser, signal.SIGKILL)
                await asyncio.to_thread(leaser.join)
                self._leasers[number] = self._start()
                self.killed += 1
            else:
                _signal(leaser, signal.SIGSTOP)
                await asyncio.sleep(3 * LEASE * self._chance.random())
                _signal(leaser, signal.SIGCONT)
                self.frozen += 1

    async def end(self) -> None:
        """Stop the leasers; slots that they hold stay leased."""
        for leaser in self._leasers:
            _signal(leaser, signal.SIGTERM)
        for leaser in self._leasers:
            await asyncio.to_thread(leaser.join)

    def kill(self) -> None:
        """Kill all leasers."""
        for leaser in self._leasers:
            _signal(leaser, signal.SIGKILL)
            leaser.join()

    async def come_back(self) -> float:
        """Reconcile until all leases have ended; return the seconds until no slot was held."""
        began = time.monotonic()
        while sum(info.held for info in (await self.backend.slots.inspect()).endpoints):
            assert time.monotonic() - began < _PATIENCE, "slots have leaked"
            for place in PLACES:
                jobs = await running(self.backend, place)
                seen = Seen(active=len(jobs), jobs=jobs)
                await self.backend.slots.reconcile(place.model, place.server, seen, settled=SETTLED)
            await asyncio.sleep(SETTLED / 4)
        return time.monotonic() - began

    def history(self) -> Figures:
        """Check the calls of all leasers and return the result. Fails if a leaser printed an error."""
        for output in self._folder.glob("*.out"):
            assert not output.read_text(), output.read_text()
        return check(read(self._folder.glob("*.jsonl")))

    def _start(self) -> BaseProcess:
        self._starts += 1
        name = f"leaser{self._starts}"
        prefix, log = self.backend._context.settings.prefix, str(self._folder / f"{name}.jsonl")
        seed = self._chance.randrange(1 << 32)
        orders = Orders(name=name, url=self._url, prefix=prefix, log=log, seed=seed)
        process = _nursery.Process(target=perform, args=(orders,), daemon=True)
        process.start()
        return process

    async def _fence(self) -> int:
        partition = self.backend._context.scripts.partitions.names[0]
        told = await self.backend._context.client.command(
            partition, "HGET", f"{partition}:slots", "fence"
        )
        return int(told)


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    if process.exitcode is None and process.pid is not None:
        os.kill(process.pid, number)


@contextlib.asynccontextmanager
async def _running(folder: Path, seed: int) -> AsyncIterator[Run]:
    (folder / "logs").mkdir(parents=True)
    with RedisServer(find_engine(), folder / "redis") as server:
        backend = RedisBackend(settings=settings_of(server.url, "tq"))
        run = Run(folder / "logs", backend, server.url, seed)
        async with contextlib.aclosing(backend):
            try:
                await run.register()
                yield run
            finally:
                run.kill()


@LONG
@pytest.mark.parametrize(
    ("grants", "seed"),
    [(5_000, 0), pytest.param(100_000, 1, marks=CHAOS)],
)
async def test_no_slot_is_granted_twice(folder: Path, grants: int, seed: int) -> None:
    """C23, faults H1, H2 and H4: whatever happens to dispatchers, no slot has two holders and none leaks (R16).

    All slots are free again after a lease and two observations of their servers.
    """
    async with _running(folder, seed) as run:
        # More than needed, because some answers are lost and some leases are taken over.
        await run.rage(grants + grants // 20)
        await run.end()
        took = await run.come_back()
        figures = run.history()
        leases: list[SlotLease] = []
        for model in sorted({place.model for place in PLACES}):
            leases += await run.backend.slots.acquire(model, "last", ttl=60, limit=100)
    print(f"{figures}; {run.killed} killed, {run.frozen} frozen, all back after {took:.2f} s")  # noqa: T201
    assert figures.broken == []
    assert figures.granted >= grants
    assert took < LEASE + 2 * SETTLED + _SLACK
    both = sum(place.slots for place in PLACES if place.server == "both")
    assert len(leases) == sum(place.slots for place in PLACES) - both + TOGETHER
    # Assert that the run was demanding: nearly all slots were held at once, and every rare case occurred.
    assert sum(figures.most.values()) >= sum(place.slots for place in PLACES) - 4
    assert min(figures.told[kind] for kind in ("resumed", "ended", "stale", "unanswered")) > 0


_PLACE = Place("m", "s", 1)


def _call(name: str, what: str, at: float, **more: object) -> Call:
    return Call(name=name, what=what, asked=at, answered=at + 0.01, **more)  # type: ignore[arg-type]


def _granted(fence: int, at: float, *, job: str | None = None, resumed: bool = False) -> Held:
    return Held(fence, "m", "s", job, at + LEASE, resumed)


def _bound(fence: int, at: float, job: str) -> list[Call]:
    return [
        _call(f"a{fence}", "acquire", at, told=[_granted(fence, at)]),
        _call(f"b{fence}", "assign", at + 0.02, fences=[fence], jobs=[job], told=[_granted(fence, at + 0.02, job=job)]),
    ]  # fmt: skip


_WRONG = {
    "of 1 slots": [*_bound(1, 0.0, "j"), *_bound(2, 10.0, "k")],
    "above that of a later": [
        _call("a", "acquire", 0.0, told=[_granted(2, 0.0)]),
        _call("b", "acquire", 1.0, told=[_granted(1, 1.0)]),
    ],
    "lost without a cause": [
        *_bound(1, 0.0, "j"), _call("c", "renew", 1.0, fences=[1], told=[None]),
    ],
    "a stale token": [
        _call("a", "acquire", 0.0, told=[_granted(1, 0.0)]),
        _call("b", "release", 0.1, fences=[1], released=[True]),
        _call("c", "release", 0.2, fences=[1], released=[True]),
    ],
    "after it began": [
        *_bound(1, 0.0, "j"),
        _call("c", "reconcile", 0.05, model="m", server="s", told=[_granted(1, 0.0, job="j")]),
    ],
    "lost without": [
        *_bound(1, 0.0, "j"),
        _call("c", "reconcile", 0.05, model="m", server="s", silent=True),
        _call("d", "renew", 0.1, fences=[1], told=[None]),
    ],
    "look: it": [_call("a", "look", 0.0, faults=["it"])],
}  # fmt: skip
_RIGHT = {
    "released": [*_bound(1, 0.0, "j"), _call("c", "release", 1.0, fences=[1], released=[True]), *_bound(2, 2.0, "k")],
    "run out": [_call("a", "acquire", 0.0, told=[_granted(1, 0.0)]), *_bound(2, LEASE, "k")],
    "reconciled": [
        *_bound(1, 0.0, "j"),
        _call("c", "reconcile", 1.0, model="m", server="s", told=[_granted(1, 0.02, job="j")]),
        _call("d", "renew", 1.5, fences=[1], told=[None]),
        *_bound(2, 2.0, "k"),
    ],
    "silent": [
        _call("a", "acquire", 0.0, told=[_granted(1, 0.0)]),
        _call("c", "reconcile", 0.05, model="m", server="s", silent=True),
        *_bound(2, 0.1, "k"),
        _call("d", "assign", 0.2, fences=[1], jobs=["j"], told=[None]),
    ],
    "unheard": [
        *_bound(1, 0.0, "j"),
        Call(name="c", what="reconcile", asked=1.0, model="m", server="s"),
        *_bound(2, 2.0, "k"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("broken", _WRONG)
def test_the_checker_notices(broken: str) -> None:
    """R16: each kind of violation in a history is detected and reported with its own message."""
    found = check(_WRONG[broken], [_PLACE]).broken
    assert len(found) == 1
    assert broken in found[0]


@pytest.mark.parametrize("name", _RIGHT)
def test_the_checker_accepts_valid_histories(name: str) -> None:
    """R16: a slot that was released, expired or reconciled may be granted again without a violation."""
    assert check(_RIGHT[name], [_PLACE]).broken == []
