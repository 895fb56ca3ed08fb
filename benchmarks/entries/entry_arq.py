"""arq: one call per task on one event loop, without results."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import urlsplit

import uvloop
from adapter import BATCH, Book, PlainRedis, payload, serve, until_settled
from arq import Worker, create_pool
from arq.connections import RedisSettings

JOBS = 100
POLL = 0.001
"""it waits so long between looks at its queue; the default, 0.5 s, drains three times slower"""
QUEUE = "arq:queue"
book = Book()


async def handle(_: dict[str, Any], number: int, sent: float, note: str) -> None:  # noqa: ARG001 - a task's payload
    """Handle one task."""
    book.note(number, sent)


class OnArq:
    """Results are kept for 0 seconds, so none is written."""

    packages = ("arq", "redis", "hiredis", "uvloop")

    async def open(self, url: str) -> None:
        """Connect."""
        self._plain = PlainRedis(url)
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self._settings = RedisSettings(host=parts.hostname, port=parts.port)
        self._pool = await create_pool(self._settings)

    async def publish(self, number: int, sent: float) -> None:
        """Enqueue one job."""
        job = await self._pool.enqueue_job("handle", **payload(number, sent))
        assert job is not None

    async def publish_many(self, numbers: range) -> None:
        """Enqueue batches concurrently: it has no bulk call."""
        for first in range(numbers.start, numbers.stop, BATCH):
            batch = range(first, min(first + BATCH, numbers.stop))
            await asyncio.gather(*(self.publish(number, 0.0) for number in batch))

    async def work(self, on: Book) -> None:
        """Run its worker until all is handled."""
        global book
        book, full = on, on.waiter()
        worker = Worker(
            [handle],
            redis_settings=self._settings,
            max_jobs=JOBS,
            poll_delay=POLL,
            keep_result=0,
            handle_signals=False,
            log_results=False,
        )
        running = asyncio.create_task(worker.async_run())
        await full.wait()
        await until_settled(self)
        running.cancel()
        await asyncio.wait({running})
        await worker.close()

    def left(self) -> int:
        """Jobs in its queue: one leaves it when it is done."""
        return int(self._plain("ZCARD", QUEUE))

    async def close(self) -> None:
        """Close its connections."""
        await self._pool.aclose()


async def make(_: str, url: str) -> OnArq:
    """Open it within the loop that it will use."""
    logging.disable(logging.WARNING)
    entry = OnArq()
    await entry.open(url)
    return entry


if __name__ == "__main__":
    serve(make, uvloop.new_event_loop)
