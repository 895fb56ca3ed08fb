"""docket: one call per task on one event loop."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import uvloop
from adapter import Book, PlainRedis, handle, payload, run_until_settled, serve
from docket import Docket, Worker
from docket.execution import Disposition

CONCURRENCY = 100
STILL = timedelta(milliseconds=1)
"""it sleeps so long whenever all slots are taken; the default, 250 ms, drains ten times slower"""
STREAM = "bench:stream"


class OnDocket:
    """Keys are its own fresh ones; nothing is kept of what is done."""

    packages = ("pydocket", "redis", "hiredis", "uvloop")

    def __init__(self, _: str, url: str) -> None:
        self._url = url
        self._plain = PlainRedis(url)
        self._opened = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Connect, with connections for every slot."""
        self._docket = await self._opened.enter_async_context(
            Docket("bench", url=f"{self._url}?max_connections=400", execution_ttl=timedelta(0))
        )
        self._docket.register(handle)

    async def publish(self, number: int, sent: float) -> None:
        """Add one task."""
        await self._docket.add(handle)(**payload(number, sent))

    async def publish_many(self, numbers: range) -> None:
        """Add tasks by its bulk call, which pipelines 1,000 at a time."""
        answers = await self._docket.add_many(
            self._docket.call(handle)(**payload(number)) for number in numbers
        )
        assert all(answer.disposition is Disposition.SCHEDULED for answer in answers)

    async def work(self, book: Book) -> None:
        """Run its worker until all is handled."""
        async with Worker(
            self._docket, concurrency=CONCURRENCY, minimum_check_interval=STILL
        ) as worker:
            await run_until_settled(self, book, worker.run_forever())

    def left(self) -> int:
        """Entries of its stream: it deletes what it has acknowledged."""
        return int(self._plain("XLEN", STREAM))

    async def close(self) -> None:
        """Close its connections."""
        await self._opened.aclose()


if __name__ == "__main__":
    serve(OnDocket, uvloop.new_event_loop)
