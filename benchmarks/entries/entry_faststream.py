"""FastStream on a Redis stream with a consumer group. Modes: ``one`` call per message, or per ``batch``."""

from __future__ import annotations

from typing import Any

import uvloop
from adapter import BATCH, Book, PlainRedis, payload, serve, until_settled
from faststream.redis import RedisBroker, StreamSub

STREAM = "bench"
GROUP = "workers"
book = Book()


async def handle(number: int, sent: float, note: str) -> None:  # noqa: ARG001 - a task's payload
    """Handle one message."""
    book.note(number, sent)


async def handle_batch(messages: list[dict[str, Any]]) -> None:
    """Handle a batch."""
    for message in messages:
        book.note(message["number"], message["sent"])


class OnFastStream:
    """A producer is a broker without subscribers; a worker starts one with its subscriber."""

    packages = ("faststream", "redis", "hiredis", "uvloop")

    async def open(self, mode: str, url: str) -> None:
        """Connect, and create the group at the stream's beginning."""
        self._plain = PlainRedis(url)
        self._mode, self._url = mode, url
        self._broker = RedisBroker(url, socket_timeout=60, logger=None)
        self._client = await self._broker.connect()

    async def publish(self, number: int, sent: float) -> None:
        """Publish one message."""
        await self._broker.publish(payload(number, sent), stream=STREAM)

    async def publish_many(self, numbers: range) -> None:
        """Publish through a pipeline of its client, as its documentation shows."""
        for first in range(numbers.start, numbers.stop, BATCH):
            async with self._client.pipeline(transaction=False) as pipeline:
                for number in range(first, min(first + BATCH, numbers.stop)):
                    await self._broker.publish(payload(number), stream=STREAM, pipeline=pipeline)
                await pipeline.execute()

    async def work(self, on: Book) -> None:
        """Run a subscriber until all is handled."""
        global book
        book, full = on, on.waiter()
        broker = RedisBroker(self._url, socket_timeout=60, logger=None)
        batch = self._mode == "batch"
        where = StreamSub(
            STREAM, group=GROUP, consumer="one", last_id=">", max_records=BATCH, batch=batch
        )
        broker.subscriber(stream=where)(handle_batch if batch else handle)
        if not self._plain("EXISTS", STREAM) or not self._plain("XINFO", "GROUPS", STREAM):
            self._plain("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")
        await broker.start()
        await full.wait()
        await until_settled(self)
        await broker.stop()

    def left(self) -> int:
        """Entries not read or not acknowledged: it deletes none."""
        return self._plain.group_left(STREAM, GROUP)

    async def close(self) -> None:
        """Close its connections."""
        await self._broker.stop()


async def make(mode: str, url: str) -> OnFastStream:
    """Open it within the loop that it will use."""
    entry = OnFastStream()
    await entry.open(mode, url)
    return entry


if __name__ == "__main__":
    serve(make, uvloop.new_event_loop)
