"""The library arq: each task is one call in an event loop; results are not stored."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import uvloop
from adapter import Book, PlainRedis, batches, payload, run_until_settled, serve
from arq import Worker, create_pool
from arq.connections import RedisSettings

JOBS = 100
POLL = 0.001
"""seconds between two polls of the queue; with the default of 0.5, the drain is three times slower"""
QUEUE = "arq:queue"


async def handle(_: dict[str, Any], number: int, sent: float, note: str) -> None:  # noqa: ARG001 - a task's payload
    """Handle one task."""
    Book.current.note(number, sent)


class OnArq:
    """An entry for arq. Results are kept for 0 seconds, so arq writes none."""

    packages = ("arq", "redis", "hiredis", "uvloop")

    def __init__(self, _: str, url: str) -> None:
        self._plain = PlainRedis(url)
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self._settings = RedisSettings(host=parts.hostname, port=parts.port)

    async def open(self) -> None:
        """Connect to Redis."""
        self._pool = await create_pool(self._settings)

    async def publish(self, number: int, sent: float) -> None:
        """Enqueue one job."""
        job = await self._pool.enqueue_job("handle", **payload(number, sent))
        assert job is not None

    async def publish_many(self, numbers: range) -> None:
        """Enqueue the tasks of each batch concurrently, because arq has no bulk call."""
        for batch in batches(numbers):
            await asyncio.gather(*(self.publish(number, 0.0) for number in batch))

    async def work(self, book: Book) -> None:
        """Run arq's worker until all tasks are handled and settled."""
        worker = Worker(
            [handle],
            redis_settings=self._settings,
            max_jobs=JOBS,
            poll_delay=POLL,
            keep_result=0,
            handle_signals=False,
            log_results=False,
        )
        await run_until_settled(self, book, worker.async_run())
        await worker.close()

    def left(self) -> int:
        """Return the number of jobs in arq's queue, which removes a job when it is done."""
        return int(self._plain("ZCARD", QUEUE))

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._pool.aclose()


if __name__ == "__main__":
    serve(OnArq, uvloop.new_event_loop)
