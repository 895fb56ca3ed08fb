"""The library streaq: each task is one call in an event loop; results are not stored."""

from __future__ import annotations

import contextlib

import uvloop
from adapter import Book, PlainRedis, batches, handle, payload, run_until_settled, serve
from streaq import Worker

CONCURRENCY = 100
BULK = 1000
STREAM = "streaq:bench:queues:normal"


class OnStreaq:
    """An entry for streaq. Results are kept for 0 seconds, so streaq stores none."""

    packages = ("streaq", "coredis", "uvloop")

    def __init__(self, _: str, url: str) -> None:
        self._url = url
        self._plain = PlainRedis(url)
        self._opened = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Connect to Redis."""
        self._worker = self._made()
        self._task = self._worker.task(ttl=0, silent=True)(handle)
        await self._opened.enter_async_context(self._worker)

    def _made(self) -> Worker[None]:
        return Worker(
            redis_url=self._url,
            queue_name="bench",
            concurrency=CONCURRENCY,
            prefetch=CONCURRENCY,
            handle_signals=False,
        )

    async def publish(self, number: int, sent: float) -> None:
        """Enqueue one task."""
        await self._task.enqueue(**payload(number, sent))

    async def publish_many(self, numbers: range) -> None:
        """Enqueue tasks with streaq's bulk call."""
        for batch in batches(numbers, BULK):
            await self._worker.enqueue_many(
                [self._task.enqueue(**payload(number)) for number in batch]
            )

    async def work(self, book: Book) -> None:
        """Run streaq's worker until all tasks are handled and settled."""
        worker = self._made()
        worker.task(ttl=0, silent=True)(handle)
        await run_until_settled(self, book, worker.run_async())

    def left(self) -> int:
        """Return the number of entries in streaq's stream, which deletes acknowledged entries."""
        return int(self._plain("XLEN", STREAM))

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._opened.aclose()


if __name__ == "__main__":
    serve(OnStreaq, uvloop.new_event_loop)
