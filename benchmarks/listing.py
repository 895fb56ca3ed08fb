"""Measure what lists of tasks cost with a million tasks: ``python benchmarks/listing.py [--tasks N] [--memory]``.

A million tasks are in 2,000 queues, half of them in one queue, in all states; they have 500 tenants and indexed tags.
A server process answers each request by itself, one after another. A row has the time from request to response, which
another program on the machine prolongs, and the processor time of server and Redis in that time, which it does not.
With ``--memory``, half of the tasks wait in one queue of the memory backend, and a row has the time of a call.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from taskqueue_core.after import After, TaskRef
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_redis import RedisBackend
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer
from tests.redis.serving import serving

_QUEUES, _TENANTS, _USERS = 2000, 500, 5000
_BIG = "big"
_SHARES = {
    State.IN_FLIGHT: 0.02, State.DEAD: 0.04, State.DONE: 0.1, State.SCHEDULED: 0.1,
    State.BLOCKED: 0.02, State.CANCELLED: 0.02,
}  # fmt: skip
"""shares of the tasks of the big queue; the others wait"""
_BATCH, _AT_ONCE = 1000, 4
_LEASE = 60.0
"""seconds, the same for the worker that holds deliveries and for the server, which would release them otherwise"""
_GOAL = 100.0
"""milliseconds of the server's time at the 99th percentile"""


def _tasks(key: str, number: int, prefix: str, **fields: Any) -> Iterator[Task]:
    for n in range(number):
        yield Task(
            key=key, id=f"{prefix}{n:07}", payload=b'{"order":4711}', tenant=f"t{n % _TENANTS}",
            tags=(f"user:{n % _USERS}",), **fields,
        )  # fmt: skip


async def _publish(backend: Backend, tasks: Iterator[Task]) -> None:
    """Publish tasks in batches, a few of them at once."""

    async def publish() -> None:
        while batch := [task for _, task in zip(range(_BATCH), tasks, strict=False)]:
            await backend.publisher.publish(*batch)

    await asyncio.gather(*(publish() for _ in range(_AT_ONCE)))


async def _fill(backend: RedisBackend, total: int) -> Any:
    """Fill the queues, and return the subscription that has deliveries."""
    big = total // 2
    counts = {state: int(share * big) for state, share in _SHARES.items()}
    await backend.control.configure(
        _BIG, QueueSettings(index=("user",), keep_ended=86_400, capacity=None)
    )
    subscription = backend.subscribe([_BIG], "worker-1")
    for state in (State.DONE, State.DEAD):
        await _publish(backend, _tasks(_BIG, counts[state], state.value))
        left = counts[state]
        while left:
            received = (await subscription.receive(min(_BATCH, left), 5)).deliveries
            left -= len(received)
            if state is State.DONE:
                await subscription.ack(*received)
            else:
                await asyncio.gather(
                    *(
                        subscription.dead_letter(each, "max_attempts", "TimeoutError")
                        for each in received
                    )
                )
    later = backend.now() + 86_400
    await _publish(backend, _tasks(_BIG, counts[State.SCHEDULED], "later", not_before=later))
    gate = After(tasks=(TaskRef(_BIG, "later0000000"),))
    await _publish(backend, _tasks(_BIG, counts[State.BLOCKED], "blocked", after=gate))
    await _publish(backend, _tasks(_BIG, counts[State.CANCELLED], "cancelled"))
    for start in range(0, counts[State.CANCELLED], 200):
        ids = [f"cancelled{n:07}" for n in range(start, min(start + 200, counts[State.CANCELLED]))]
        await asyncio.gather(*(backend.control.cancel(_BIG, each) for each in ids))
    await _publish(
        backend, _tasks(_BIG, big - sum(counts.values()) + counts[State.IN_FLIGHT], "waits")
    )
    each = (total - big) // (_QUEUES - 1)
    for n in range(1, _QUEUES):
        await _publish(backend, _tasks(f"q{n:04}", each, "small"))
    left = counts[State.IN_FLIGHT]
    while left:
        left -= len((await subscription.receive(min(_BATCH, left), 5)).deliveries)
    return subscription


def _spent(pids: list[int]) -> float:
    """Return the milliseconds of processor time of all threads of the processes."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e6


async def _row(
    client: httpx2.AsyncClient, pids: list[int], url: str, rounds: int
) -> tuple[float, float, float, float]:
    """Return the median and the 99th percentile of the time, and of the processor time, of a request."""
    times, spent = list[float](), list[float]()
    for _ in range(rounds):
        before, start = _spent(pids), time.perf_counter()
        answer = await client.get(url)
        times.append((time.perf_counter() - start) * 1000)
        spent.append(_spent(pids) - before)
        assert answer.status_code == 200, answer.text[-600:]
    return (*_figures(times), *_figures(spent))


def _figures(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), sorted(values)[max(0, int(len(values) * 0.99) - 1)]


async def _pages(client: httpx2.AsyncClient, query: str) -> list[str]:
    """Return the cursors of all pages of 1,000 tasks of a list."""
    cursors, after = [""], ""
    while True:
        found = (await client.get(f"/v1/queues/{_BIG}/tasks?{query}&limit=1000{after}")).json()
        if "next" not in found:
            return cursors
        after = f"&after={found['next']}"
        cursors.append(after)


async def _rows(client: httpx2.AsyncClient) -> list[tuple[str, str]]:
    """Return the names and the URLs of all requests."""
    queries = [f"state={state.value}" for state in State]
    queries += [f"tag=user:{_USERS - 1}", f"tag=user:{_USERS - 1}&state=waiting"]
    queries += [
        "state=waiting&tenant=t7",
        "state=done&tenant=t7",
        "state=in_flight&worker=worker-1",
        "state=in_flight&tenant=t7",
    ]
    rows = []
    for query in queries:
        cursors = await _pages(client, query)
        places = {"first": 0, "middle": len(cursors) // 2, "last": len(cursors) - 1}
        for place, number in places.items():
            if place == "first" or len(cursors) > 1:
                url = f"/v1/queues/{_BIG}/tasks?{query}&limit=100{cursors[number]}"
                rows.append((f"{query}, {place} page", url))
        rows.append((f"{query}, newest", f"/v1/queues/{_BIG}/tasks?{query}&limit=100&newest=true"))
    for query in ("state=done", "state=dead"):
        cursors = await _pages(client, query)
        middle = f"/v1/queues/{_BIG}/tasks?{query}&limit=1{cursors[len(cursors) // 2]}"
        at = (await client.get(middle)).json()["tasks"][0]["updated_at"]
        url = f"/v1/queues/{_BIG}/tasks?{query}&worker=worker-1&limit=100"
        rows.append((f"{query} of a worker, since the middle", f"{url}&since={at:.6f}"))
        rows.append(
            (f"{query} of a worker, newest until then", f"{url}&newest=true&until={at:.6f}")
        )
    rows.append(("1,000 waiting", f"/v1/queues/{_BIG}/tasks?state=waiting&limit=1000"))
    rows.append(("detail of a task", f"/v1/tasks/{_BIG}/dead0000001?detail=true"))
    pages = {
        "overview": "/", "queue": f"/queues/{_BIG}", "waiting": f"/queues/{_BIG}/tasks",
        "dead": f"/queues/{_BIG}/tasks?state=dead", "tag": f"/queues/{_BIG}/tasks?tag=user:1",
        "tenant": f"/queues/{_BIG}/tasks?state=waiting&tenant=t7",
        "task": f"/tasks/{_BIG}/dead0000001", "workers": "/workers",
    }  # fmt: skip
    return rows + [(f"dashboard: {name}", url) for name, url in pages.items()]


async def _measure(total: int, rounds: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(find_engine(), Path(folder)) as server,
    ):
        own = Path(folder) / "server"
        own.mkdir()
        async with opened(server.url, "lists", lease=_LEASE) as backend:
            start = time.perf_counter()
            subscription = await _fill(backend, total)
            print(f"{total:,} tasks published in {time.perf_counter() - start:.0f} s", flush=True)
            async with (
                serving(
                    own,
                    backend="redis",
                    redis_url=server.url,
                    redis_prefix="lists",
                    redis_lease=str(_LEASE),
                ) as running,  # fmt: skip
                httpx2.AsyncClient(base_url=running.url, timeout=60) as client,
            ):
                pids = [running.process.pid, server.pid]
                print(f"{'request':58} {'ms p50':>8} {'p99':>8}   {'cpu p50':>8} {'p99':>8}")
                for name, url in await _rows(client):
                    figures = await _row(client, pids, url, rounds)
                    above = "  above the goal" if figures[3] > _GOAL else ""
                    shown = "{:8.1f} {:8.1f}   {:8.1f} {:8.1f}".format(*figures)
                    print(f"{name:58} {shown}{above}", flush=True)
            await subscription.close()


async def _measure_memory(total: int, rounds: int) -> None:
    """Print the times of calls of the memory backend, between which 1,000 tasks change if the row says so."""
    backend = MemoryBackend()
    await _publish(backend, _tasks(_BIG, total // 2, "waits"))
    subscription = backend.subscribe([_BIG], "worker-1")
    half = await _middle(backend)
    rows: dict[str, dict[str, Any]] = {
        "first page": {},
        "newest": {"newest": True},
        "middle page": {"after": half},
        "a tenant": {"tenant": "t7"},
        "first page, after 1,000 changes": {},
    }
    print(f"{total // 2:,} tasks\n{'call':40} {'ms p50':>8} {'p99':>8} {'max':>8}", flush=True)
    for name, query in rows.items():
        times = list[float]()
        for _ in range(rounds):
            if "changes" in name:
                await subscription.ack(*(await subscription.receive(500, 0)).deliveries)
            start = time.perf_counter()
            await backend.listing.tasks(_BIG, state=State.WAITING, **query)
            times.append((time.perf_counter() - start) * 1000)
        shown = "{:8.2f} {:8.2f} {:8.2f}".format(*_figures(times), max(times))
        print(f"{name:40} {shown}", flush=True)


async def _middle(backend: MemoryBackend) -> str | None:
    """Return the cursor of the middle of the waiting tasks, after a walk through half of them."""
    after, left = None, (await backend.control.ledger(_BIG)).waiting // 2
    while left > 0:
        page = await backend.listing.tasks(_BIG, state=State.WAITING, after=after, limit=1000)
        after, left = page.next, left - 1000
    return after


def main() -> None:
    """Fill a backend, and print a row for each request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="Number of tasks.")
    parser.add_argument("--rounds", type=int, default=100, help="Number of requests of a row.")
    parser.add_argument("--memory", action="store_true", help="Measure the memory backend.")
    given = parser.parse_args()
    asyncio.run((_measure_memory if given.memory else _measure)(given.tasks, given.rounds))


if __name__ == "__main__":
    main()
