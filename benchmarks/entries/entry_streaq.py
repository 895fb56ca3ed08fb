"""streaq: one call per task on one event loop, without results."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import uvloop
from adapter import Book, PlainRedis, payload, serve, until_settled
from streaq import Worker

CONCURRENCY = 100
BULK = 1000
STREAM = "streaq:bench:queues:normal"
book = Book()


async def handle(number: int, sent: float, note: str) -> None:  # noqa: ARG001 - a task's payload
    """Handle one task."""
    book.note(number, sent)


class OnStreaq:
    """Its result lives for 0 seconds, so nothing is kept."""

    packages = ("streaq", "coredis", "uvloop")

    async def open(self, url: str) -> None:
        """Connect."""
        self._plain = PlainRedis(url)
        self._worker = self._made(url)
        self._task = self._worker.task(ttl=0, silent=True)(handle)
        self._url = url
        self._opened = contextlib.AsyncExitStack()
        await self._opened.enter_async_context(self._worker)

    def _made(self, url: str) -> Worker[None]:
        return Worker(
            redis_url=url,
            queue_name="bench",
            concurrency=CONCURRENCY,
            prefetch=CONCURRENCY,
            handle_signals=False,
        )

    async def publish(self, number: int, sent: float) -> None:
        """Enqueue one task."""
        await self._task.enqueue(**payload(number, sent))

    async def publish_many(self, numbers: range) -> None:
        """Enqueue by its bulk call."""
        for first in range(numbers.start, numbers.stop, BULK):
            batch = range(first, min(first + BULK, numbers.stop))
            await self._worker.enqueue_many(
                [self._task.enqueue(**payload(number)) for number in batch]
            )

    async def work(self, on: Book) -> None:
        """Run a worker until all is handled."""
        global book
        book, full = on, on.waiter()
        worker = self._made(self._url)
        worker.task(ttl=0, silent=True)(handle)
        running = asyncio.create_task(worker.run_async())
        await full.wait()
        await until_settled(self)
        running.cancel()
        await asyncio.wait({running})

    def left(self) -> int:
        """Entries of its stream: it deletes what it has acknowledged."""
        return int(self._plain("XLEN", STREAM))

    async def close(self) -> None:
        """Close its connections."""
        await self._opened.aclose()


async def make(_: str, url: str) -> OnStreaq:
    """Open it within the loop that it will use."""
    logging.disable(logging.WARNING)
    entry = OnStreaq()
    await entry.open(url)
    return entry


if __name__ == "__main__":
    serve(make, uvloop.new_event_loop)
