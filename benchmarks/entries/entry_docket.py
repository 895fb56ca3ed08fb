"""The library docket: each task is one call in an event loop."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import uvloop
from adapter import Book, PlainRedis, handle, payload, run_until_settled, serve
from docket import Docket, Worker
from docket.execution import Disposition

CONCURRENCY = 100
STILL = timedelta(milliseconds=1)
"""how long docket sleeps when all slots are busy; with the default of 250 ms, the drain is ten times slower"""
STREAM = "bench:stream"


class OnDocket:
    """An entry for docket. docket chooses the keys of tasks, and keeps nothing of finished tasks."""

    packages = ("pydocket", "redis", "hiredis", "uvloop")

    def __init__(self, _: str, url: str) -> None:
        self._url = url
        self._plain = PlainRedis(url)
        self._opened = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Connect to Redis, with one connection for each slot."""
        self._docket = await self._opened.enter_async_context(
            Docket("bench", url=f"{self._url}?max_connections=400", execution_ttl=timedelta(0))
        )
        self._docket.register(handle)

    async def publish(self, number: int, sent: float) -> None:
        """Add one task."""
        await self._docket.add(handle)(**payload(number, sent))

    async def publish_many(self, numbers: range) -> None:
        """Add tasks with docket's bulk call, in pipelines of 1,000."""
        answers = await self._docket.add_many(
            self._docket.call(handle)(**payload(number)) for number in numbers
        )
        assert all(answer.disposition is Disposition.SCHEDULED for answer in answers)

    async def work(self, book: Book) -> None:
        """Run docket's worker until all tasks are handled and settled."""
        async with Worker(
            self._docket, concurrency=CONCURRENCY, minimum_check_interval=STILL
        ) as worker:
            await run_until_settled(self, book, worker.run_forever())

    def left(self) -> int:
        """Return the number of entries in docket's stream, which deletes acknowledged entries."""
        return int(self._plain("XLEN", STREAM))

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._opened.aclose()


if __name__ == "__main__":
    serve(OnDocket, uvloop.new_event_loop)
