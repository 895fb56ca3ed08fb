"""Measure whether the maintenance of the Redis backend keeps up: ``python benchmarks/maintenance.py [--seconds 600]``.

Part one publishes, receives and acks at a fixed rate, and compares the records that Redis stores with those that are
within `dedupe_window`. Part two stops a consumer with many deliveries, and measures how long after the end of its lease
another consumer has received all of them. Every server of ``--servers`` runs the maintenance loop, as in production.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.consumer.maintenance import run_maintenance
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

_KEY = "bench"
_BATCH = 100
_CLIENTS = 4
_PREFIX = "bench"
_RECORDS = f"{{{_PREFIX}:0}}:q:{_KEY}/t"
_LEASE = 5.0


class Share:
    """The time that maintenance has taken in Redis."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.longest = 0.0
        self.passes = 0

    def watch(self, backend: RedisBackend) -> None:
        """Measure all maintenance passes of a backend that leave work."""
        scripts: Any = backend._context.scripts  # noqa: SLF001 - only the script returns its duration
        run = scripts.run

        async def measured(name: str, *args: Any, **options: Any) -> Any:
            reply = await run(name, *args, **options)
            if name == "maintain" and int(reply[10] or 0):
                took = int(reply[10]) / 1e6
                self.seconds += took
                self.longest = max(self.longest, took)
                self.passes += 1
            return reply

        scripts.run = measured


@asynccontextmanager
async def maintained(url: str, servers: int, share: Share) -> AsyncIterator[None]:
    """Run the maintenance loops of several servers until the block ends."""
    async with AsyncExitStack() as stack:
        loops = []
        for _ in range(servers):
            backend = await stack.enter_async_context(
                opened(url, _PREFIX, lease=_LEASE, housekeeping=2.0)
            )
            share.watch(backend)
            loops.append(asyncio.create_task(run_maintenance(backend)))
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)


async def work(backend: RedisBackend, name: str, rate: float, end: float) -> int:
    """Publish, receive and ack in batches at a rate until ``end``; return the number of tasks."""
    done, start = 0, time.monotonic()
    async with backend.subscribe([_KEY], name) as consumer:
        while (now := time.monotonic()) < end:
            ahead = done / rate - (now - start)
            if ahead > 0:
                await asyncio.sleep(ahead)
            tasks = [Task(key=_KEY, id=f"{name}-{done + n}") for n in range(_BATCH)]
            await backend.publisher.publish(*tasks)
            received = await consumer.receive(_BATCH, 1.0)
            await consumer.ack(*received.deliveries)
            done += len(received.deliveries)
    return done


async def records_left(server: RedisServer, options: argparse.Namespace) -> None:
    """Print how many records Redis stores under a constant load, compared with those within the window."""
    share, ratios = Share(), list[float]()
    async with opened(server.url, _PREFIX, lease=_LEASE) as backend:
        await backend.control.configure(_KEY, QueueSettings(dedupe_window=options.window))
        async with maintained(server.url, options.servers, share):
            start = time.monotonic()
            end = start + options.seconds
            clients = [
                asyncio.create_task(work(backend, f"c{n}", options.rate / _CLIENTS, end))
                for n in range(_CLIENTS)
            ]
            while time.monotonic() < end - 1:
                await asyncio.sleep(1)
                done = (await backend.control.ledger(_KEY)).done
                past = time.monotonic() - start
                within = done * min(1.0, options.window / past)
                if past > options.window + 5:
                    ratios.append(server.call("HLEN", _RECORDS) / within)
            total = sum(await asyncio.gather(*clients))
            left = server.call("HLEN", _RECORDS)
    print(
        f"{total / options.seconds:,.0f} tasks/s for {options.seconds:g} s, window {options.window:g} s: "
        f"{left:,} records left, at most {max(ratios, default=0):.2f} times those within the window; "
        f"maintenance with a backlog: {share.passes} passes, {share.seconds / options.seconds:.1%} of the time, "
        f"longest {1000 * share.longest:.1f} ms"
    )


async def deliveries_lost(server: RedisServer, options: argparse.Namespace) -> None:
    """Print how long after the end of a consumer's lease all of its deliveries are with another consumer."""
    share = Share()
    async with opened(server.url, _PREFIX, lease=_LEASE) as dies:
        names = [f"lost-{n}" for n in range(options.lost)]
        for at in range(0, len(names), 1000):
            await dies.publisher.publish(
                *(Task(key=_KEY, id=name) for name in names[at : at + 1000])
            )
        consumer = dies.subscribe([_KEY], "dies")
        taken = 0
        while taken < options.lost:
            taken += len((await consumer.receive(500, 1.0)).deliveries)
        async with maintained(server.url, options.servers, share):
            await asyncio.sleep(7)  # otherwise the freeze guard grants another lease
            await dies._context.heartbeat.aclose()  # noqa: SLF001 - as if the process was killed
            beat = server.call("ZSCORE", f"{{{_PREFIX}:0}}:alive", consumer.token)
            over = float(beat) / 1e6 + _LEASE
            async with (
                opened(server.url, _PREFIX, lease=_LEASE) as lives,
                lives.subscribe([_KEY], "lives") as heir,
            ):
                back = 0
                while back < options.lost:
                    received = (await heir.receive(500, 30.0)).deliveries
                    await heir.ack(*received)
                    back += len(received)
                print(
                    f"{back:,} deliveries of a killed consumer: all received {time.time() - over:.2f} s after the end "
                    f"of its lease; {share.passes} passes with a backlog, longest {1000 * share.longest:.1f} ms"
                )


async def main() -> None:
    """Measure both parts on a server of their own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=5000.0)
    parser.add_argument("--window", type=float, default=5.0)
    parser.add_argument("--lost", type=int, default=20_000)
    parser.add_argument("--servers", type=int, default=2)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(find_engine(), Path(folder) / "store", aof=False) as server,
    ):
        if options.seconds:
            await records_left(server, options)
        if options.lost:
            await deliveries_lost(server, options)


asyncio.run(main())
