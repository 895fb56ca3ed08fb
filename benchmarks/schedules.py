"""Measure what schedules cost an idle server, and how late they fire: ``python benchmarks/schedules.py``.

*Idle*: the processor time of a server and of Redis while 10,000 schedules of a day each wait, and while they fire once
an hour each, evenly spread. *Lateness*: 1,000 schedules are due in the same second; the lateness of a task is the time
at which it became available, by the store's clock, minus its instant. Rounds in which other programs use more than a
third of a core are left out of the first figures. Each server is a process on a real Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests
sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmarks.meter import QUIET, Foreign, cpu_of
from taskqueue_core.capabilities import StoredSchedule
from taskqueue_core.schedules import Cron, Every, Schedule, Spec, TaskTemplate
from taskqueue_core.schedules.schedule import next_instant
from taskqueue_core.schedules.when import When
from taskqueue_redis import RedisBackend
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer
from tests.redis.serving import serving

_AT_ONCE = 100
_INTERVAL = 5.0
"""seconds between two instants of the schedules that are due at once"""


async def _put(backend: RedisBackend, number: int, **fields: Any) -> None:
    """Put schedules, each with its own time."""

    async def put(n: int) -> None:
        when: When = fields["when"](n)
        schedule = Schedule(
            f"s{n}", when, TaskTemplate(key=f"q{n % 10}"), overlap=fields.get("overlap", "skip")
        )
        next_at = fields["start"] if "start" in fields else next_instant(schedule, backend.now())
        text = Spec(schedule=schedule).encode()
        await backend.schedules.put(
            StoredSchedule(key=schedule.task.key, name=schedule.name, spec=text, next_at=next_at)
        )

    for start in range(0, number, _AT_ONCE):
        await asyncio.gather(*(put(n) for n in range(start, min(number, start + _AT_ONCE))))


@asynccontextmanager
async def _fleet(
    folder: Path, server: RedisServer, prefix: str, number: int
) -> AsyncIterator[Sequence[int]]:
    """Run servers; yield their process ids."""
    async with AsyncExitStack() as stack:
        pids = []
        for n in range(number):
            own = folder / f"{prefix}{n}"
            own.mkdir()
            running = await stack.enter_async_context(
                serving(own, backend="redis", redis_url=server.url, redis_prefix=prefix)
            )
            pids.append(running.process.pid)
        yield pids


async def _idle(
    folder: Path, server: RedisServer, prefix: str, seconds: float, **fields: Any
) -> str:
    """Return the percent of a core that one server and Redis need, and the number of tasks published in that time."""
    async with opened(server.url, prefix) as backend:
        await _put(backend, fields.pop("number"), **fields)
        async with _fleet(folder, server, prefix, 1) as (pid,):
            await asyncio.sleep(5)
            before, redis = cpu_of(pid), cpu_of(server.pid)
            fired = await _published(backend)
            await asyncio.sleep(seconds)
            cpu, redis = cpu_of(pid) - before, cpu_of(server.pid) - redis
            fired = await _published(backend) - fired
    return f"{100 * cpu / seconds:5.2f} %   {100 * redis / seconds:5.2f} %   {fired:6}"


async def _published(backend: RedisBackend) -> int:
    return sum([(await backend.control.ledger(f"q{n}")).published for n in range(10)])


async def _late(place: tuple[Path, RedisServer], servers: int, rounds: int, number: int) -> str:
    """Return how late tasks were, and what they cost."""
    folder, server = place
    prefix = f"late{servers}"
    late: list[list[float]] = []
    others: list[float] = []
    spent: list[float] = []
    async with (
        opened(server.url, prefix) as backend,
        _fleet(folder, server, prefix, servers) as pids,
    ):
        start = float(int(backend.now()) + 10)
        await _put(backend, number, overlap="allow", start=start, when=lambda _: Every(
            _INTERVAL, since=datetime.fromtimestamp(start, UTC)
        ))  # fmt: skip
        assert backend.now() < start, (
            "the machine is too slow: the schedules are late from the start"
        )
        async with backend.subscribe([f"q{n}" for n in range(10)], "c") as subscription:
            for turn in range(rounds):
                instant = start + _INTERVAL * turn
                await asyncio.sleep(instant - 0.2 - backend.now())
                foreign = Foreign([*pids, server.pid])
                before = sum(map(cpu_of, [*pids, server.pid]))
                await asyncio.sleep(instant + 1 - backend.now())
                others.append(foreign.cores())
                spent.append(sum(map(cpu_of, [*pids, server.pid])) - before)
                found: list[
                    float
                ] = []  # read once all are published, which costs the servers nothing
                while len(found) < number and backend.now() < instant + _INTERVAL - 1:
                    received = await subscription.receive(1000, 0.5)
                    found += [(one.waiting_since or 0.0) - instant for one in received.deliveries]
                    if received.deliveries:
                        await subscription.ack(*received.deliveries)
                late.append(found)
    quiet = [n for n, cores in enumerate(others) if cores <= QUIET]
    counted = sum(map(len, late))
    return (
        f"{number} due in one second, {servers} servers: {_figures(late[n] for n in quiet)} in the "
        f"{len(quiet)} of {rounds} rounds without other work, {_figures(late)} in all; "
        f"{statistics.median(spent) * 1000:.0f} ms of processor time; {counted} of {number * rounds} tasks"
    )


def _figures(rounds: Iterable[list[float]]) -> str:
    late = sorted(chain.from_iterable(rounds))
    if not late:
        return "nothing"
    p50, p99 = statistics.median(late), late[int(len(late) * 0.99) - 1]
    return f"p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, highest {late[-1] * 1000:.0f} ms"


async def _run(args: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(find_engine(), Path(folder)) as server,
    ):
        place = Path(folder)
        if "idle" in args.only:
            print(f"{args.schedules} schedules, {args.seconds:g} s")
            print("                          server    Redis   fired")
            fields = {"number": args.schedules, "seconds": args.seconds}
            waiting = await _idle(place, server, "day", when=_far, **fields)
            print(f"none fires              {waiting}")
            hourly = await _idle(place, server, "hour", when=_hourly, **fields)
            print(f"each fires once an hour {hourly}")
        if "late" in args.only:
            for servers in args.servers:
                print(await _late((place, server), servers, args.rounds, args.due))


def _far(n: int) -> When:
    """Return a time of the year that is not now: 1 February or 1 August."""
    month = 2 if 4 <= time.gmtime().tm_mon <= 10 else 8
    return Cron(f"{n % 60} {n // 60 % 24} 1 {month} *", timezone="Europe/Berlin")


def _hourly(n: int) -> When:
    """Return an interval of an hour, with a start that differs by 0.36 s from schedule to schedule."""
    return Every(3600, since=datetime.fromtimestamp(1_700_000_000 + n % 10_000 * 36 // 100, UTC))


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="Length of each idle window.")
    parser.add_argument("--schedules", type=int, default=10_000, help="Number of idle schedules.")
    parser.add_argument("--due", type=int, default=1000, help="Number of schedules due at once.")
    parser.add_argument("--rounds", type=int, default=6, help="Number of seconds measured.")
    parser.add_argument(
        "--servers", type=int, nargs="+", default=[1, 3], help="Numbers of servers that fire."
    )
    parser.add_argument("--only", nargs="+", default=["idle", "late"], choices=["idle", "late"])
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
