"""Every answer of a real Redis to the script calls of a chaos run equals that of the specification."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import LeaseLost
from taskqueue_core.rate_limit import RateLimit
from tests.chaos.cases import SEEDS, passed, small
from tests.chaos.nemesis import schedule
from tests.model.replay import Mismatch, replay
from tests.model.traced import TracedWorld
from tests.model.tracing import Call, install, traces
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer
from tests.redis.test_books import Workload

_MENUS = ("limits", "mixed", "processes", "redis", "links")
_NUMBERS = {"consumer": 2, "producer": 2, "queue": 3}
_LIMITS: Mapping[str, Mapping[str, Any]] = {
    "alpha": {"max_inflight": 10},
    "beta": {"rate_limit": RateLimit(max_tokens=300)},
    "gamma": {"capacity": 100, "max_inflight": 15, "rate_limit": RateLimit(max_tokens=400)},
}


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_call_of_a_chaos_run(folder: Path, seed: int) -> None:
    """R0 to R10, fault M3: all script calls of four processes that are killed, frozen and cut off match the model."""
    menu = _MENUS[seed % len(_MENUS)]
    faults = schedule(seed, menu, seconds=1.0, count=6, numbers=_NUMBERS)
    shape = small(tasks=600, limits=_LIMITS if menu == "limits" else {})
    async with TracedWorld(folder, shape, seed=seed) as world:
        passed(await world.run(faults))
        assert world.replayed.compared > 300
        altered_traces_are_found(world.calls)


def altered_traces_are_found(calls: list[Call]) -> None:
    """Assert that the comparison rejects a trace with one false record."""
    place = next(n for n, call in enumerate(calls) if call.name == "ack" and b"ok" in call.answer)
    ack = calls[place]
    lies = {
        "a call is missing": [],
        "an answer is another": [ack._replace(answer=[b"lost"] * len(ack.answer))],
        "a call came twice": [ack, ack._replace(words=_renamed(ack.words))],
    }
    for lie, instead in lies.items():
        try:
            replay([*calls[:place], *instead, *calls[place + 1 :]])
        except Mismatch:
            continue
        pytest.fail(lie)


def _renamed(words: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (*words[:5], b"nobody", *words[6:])


class PlainWorkload(Workload):
    """Random workload without ordering keys, fair order and changes by hand, which the specification lacks."""

    async def limit(self) -> None:
        """Set random limits for a queue, or remove them."""
        limits: dict[str, object] = {
            "capacity": self.chance.choice((None, 10)),
            "max_inflight": self.chance.choice((0, 6)),
            "rate_limit": self.chance.choice((None, RateLimit(max_tokens=9, interval=2))),
            "paused": self.chance.random() < 0.1,
            "intake_paused": self.chance.random() < 0.1,
        }
        key = self.key()
        settings = await self.backend.control.settings(key)
        await self.backend.control.configure(key, settings.model_copy(update=limits))

    async def fall_silent(self) -> None:
        """Run maintenance instead."""
        await self.maintain()


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_call_of_any_workload(folder: Path, seed: int) -> None:
    """Laws 1 to 10, fault M3: answers to hand-overs, purges, redrives and all other calls match the specification."""
    clock, chance = ManualClock(1_700_000_000.0), random.Random(seed)
    end = install()
    try:
        with RedisServer(find_engine(), folder, aof=False) as server:
            async with opened(server.url, "m", clock=clock) as backend:
                workload = PlainWorkload(backend, clock, chance)
                workload.orders = False
                for _ in range(1000):
                    with contextlib.suppress(LeaseLost):
                        await chance.choice(workload.verbs)()
                for key in ("alpha", "beta", "gamma"):
                    await backend.control.statuses(key, *map(str, range(150)))
                    await backend.control.stats(key)
            replayed = replay(traces(server, "{m:0}"))
    finally:
        end()
    assert replayed.compared > 600
