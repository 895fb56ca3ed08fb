"""The cost of an idle worker, the latency of a run, and the rates at which runs are created and received."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from uuid import uuid4

import httpx2
import prefect_figures as figures
from meter import cpu_of
from prefect_delivery import key
from prefect_sides import Side

from tests.prefect.support import Taker

SUBSCRIBERS, KEYS = 300, 5
LOOK = 20.0
"""seconds of one sample of CPU use"""
SETTLE = 3.0
"""seconds until new connections cause no more work"""
ROUNDS, WARM = 200, 20
CLIENTS, CREATING = 8, 5.0
BACKLOG, WORKERS = 1000, 40
_IDLERS = Path(__file__).parent / "prefect_idlers.py"


def idle(side: Side) -> dict[str, float]:
    """Measure the CPU of one replica and of Redis with many subscribers, minus their CPU without any."""
    if side.site.settings["PREFECT_API_DATABASE_CONNECTION_URL"].startswith("sqlite"):
        return {}  # with SQLite, Prefect allows at most 100 requests at a time, and sockets count as requests
    parts = (side.a.pid, side.site.redis.pid)
    without = used(LOOK / 2, parts)
    words = [sys.executable, str(_IDLERS), str(SUBSCRIBERS), str(KEYS), side.a.socket]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idlers:
        try:
            assert idlers.stdout is not None
            assert idlers.stdout.readline() == b"up\n", "the subscribers could not connect"
            time.sleep(SETTLE)
            found = used(LOOK, parts)
            assert idlers.poll() is None, "the subscribers have lost their connections"
        finally:
            idlers.kill()
    server, redis = (100 * (after - before) for after, before in zip(found, without, strict=True))
    return {figures.IDLE: server, figures.IDLE_REDIS: redis}


def used(seconds: float, leaders: Iterable[int]) -> list[float]:
    """Return the share of a core that each group of processes uses, measured over ``seconds``."""
    groups = [_group(leader) for leader in leaders]
    begin = time.monotonic()
    before = [sum(map(cpu_of, group)) for group in groups]
    time.sleep(seconds)
    after = [sum(map(cpu_of, group)) for group in groups]
    span = time.monotonic() - begin
    return [(late - early) / span for early, late in zip(before, after, strict=True)]


def _group(leader: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            _, _, rest = path.read_text().rpartition(")")
            if int(rest.split()[2]) == leader:
                found.append(int(path.parent.name))
    return found


def speed(side: Side) -> dict[str, float]:
    """Measure the latency of single runs with a waiting worker at the same replica, then the rate of creating runs."""
    return asyncio.run(_speed(side))


async def _speed(side: Side) -> dict[str, float]:
    name = key()
    async with httpx2.AsyncClient(base_url=side.a.api, trust_env=False, timeout=30) as client:
        async with Taker(side.a.socket, name) as taker:
            times = [await _one(client, taker, name) for _ in range(WARM + ROUNDS)][WARM:]
        rate = await _creates(client)
    return {
        figures.P50: 1000 * median(times),
        figures.P99: 1000 * quantiles(times, n=100)[98],
        figures.CREATES: rate,
    }


async def _one(client: httpx2.AsyncClient, taker: Taker, name: str) -> float:
    begin = time.monotonic()
    create = asyncio.create_task(create_run(client, name))
    try:
        await taker.receive()
        end = time.monotonic()
        await taker.ack()
    finally:
        await create
    return end - begin


async def _creates(client: httpx2.AsyncClient) -> float:
    end = time.monotonic() + CREATING

    async def one() -> int:
        name, count = key(), 0
        while time.monotonic() < end:
            await create_run(client, name)
            count += 1
        return count

    begin = time.monotonic()
    counts = await asyncio.gather(*(one() for _ in range(CLIENTS)))
    return sum(counts) / (time.monotonic() - begin)


def drain(side: Side) -> dict[str, float]:
    """Measure the rate at which workers that connect to one replica receive and ack a backlog.

    The workers are connections of Prefect's client, all in one process, which do nothing but receive.
    """
    name = key()
    asyncio.run(_fill(side, name))
    rate = side.site.run("subscribe.py", str(WORKERS), str(BACKLOG), name, api=side.a.api)
    return {figures.DRAIN: rate}


async def _fill(side: Side, name: str) -> None:
    left = BACKLOG

    async def create(client: httpx2.AsyncClient) -> None:
        nonlocal left
        while left:
            left -= 1
            await create_run(client, name)

    async with httpx2.AsyncClient(base_url=side.a.api, trust_env=False, timeout=30) as client:
        await asyncio.gather(*(create(client) for _ in range(CLIENTS)))


async def create_run(client: httpx2.AsyncClient, name: str, **more: str) -> None:
    """Create a run; ``more`` are further details of its state."""
    details = {"deferred": True, "task_parameters_id": str(uuid4()), **more}
    answer = await client.post(
        "/task_runs/",
        json={
            "task_key": name,
            "dynamic_key": uuid4().hex,
            "name": name,
            "state": {"type": "SCHEDULED", "state_details": details},
        },
    )
    assert answer.status_code == 201, answer.text
