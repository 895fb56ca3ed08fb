"""The programs of `benchmarks/streams.py`, each in its own process: a worker, and a bare relay with its publisher."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from taskqueue_core import Context, Tasks
from taskqueue_worker import Worker

tasks = Tasks()
_TICK = 0.002
"""seconds between two pipelines of the relay's publisher"""


async def produce(number: int, rate: float, start: float, emit: Callable[[int], object]) -> None:
    """Call ``emit`` at a steady rate, ``number`` times, from a time on."""
    for n in range(number):
        await asyncio.sleep(max(0.0, start + n / rate - time.time()))
        emit(n)


@tasks.task(retry=1)
async def emit(context: Context, number: int, rate: float, start: float) -> int:
    """Stream numbers with the times of their events."""
    await produce(number, rate, start, lambda n: context.stream([n, time.time()]))
    return number


async def _work(url: str, concurrency: int) -> None:
    await Worker(tasks, url=url, concurrency=concurrency).serve()


async def _publish(url: str, streams: int, number: int, rate: float, start: float) -> None:
    """Publish the same events to channels of Redis, those of a tick together."""
    due: list[tuple[str, bytes]] = []
    async with Redis.from_url(url) as redis:

        async def send() -> None:
            while True:
                await asyncio.sleep(_TICK)
                if due:
                    pipeline = redis.pipeline(transaction=False)
                    for channel, value in due:
                        pipeline.publish(channel, value)
                    due.clear()
                    await pipeline.execute()

        def add(channel: str) -> Callable[[int], object]:
            return lambda n: due.append((channel, msgspec.json.encode([n, time.time()])))

        sending = asyncio.create_task(send())
        spread = 1 / rate / streams
        await asyncio.gather(
            *(produce(number, rate, start + s * spread, add(f"s{s}")) for s in range(streams))
        )
        await asyncio.sleep(0.1)
        sending.cancel()


def _relay(url: str, port: int) -> None:
    """Relay channels of Redis as server-sent events, without anything else: nothing is kept or numbered."""
    readers: dict[str, asyncio.Queue[bytes]] = {}

    async def pass_on(subscriber: Any) -> None:
        async for message in subscriber.listen():
            if message["type"] == "message":
                readers[message["channel"].decode()].put_nowait(message["data"])

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with Redis.from_url(url) as redis, redis.pubsub() as subscriber:
            await subscriber.subscribe("all")
            app.state.subscribe = subscriber.subscribe
            passing = asyncio.create_task(pass_on(subscriber))
            yield
            passing.cancel()

    async def stream(request: Request) -> StreamingResponse:
        name = request.path_params["name"]
        queue = readers[name] = asyncio.Queue()
        subscribe: Callable[[str], Awaitable[None]] = request.app.state.subscribe
        await subscribe(name)

        async def events() -> AsyncIterator[bytes]:
            while True:
                parts = [await queue.get()]
                while not queue.empty():
                    parts.append(queue.get_nowait())
                yield b"".join(b'data: {"value":%b}\n\n' % part for part in parts)

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/{name}", stream)], lifespan=lifespan)
    uvicorn.run(app, port=port, log_level="error", access_log=False, timeout_graceful_shutdown=1)


def main(program: str, *words: str) -> None:
    """Run a program: ``work URL CONCURRENCY``, ``relay REDIS PORT``, ``publish REDIS STREAMS NUMBER RATE START``."""
    if program == "work":
        asyncio.run(_work(words[0], int(words[1])))
    elif program == "relay":
        _relay(words[0], int(words[1]))
    else:
        streams, number = int(words[1]), int(words[2])
        asyncio.run(_publish(words[0], streams, number, float(words[3]), float(words[4])))


if __name__ == "__main__":
    main(*sys.argv[1:])
