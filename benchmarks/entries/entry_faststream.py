"""The library FastStream on a Redis stream: one call per message, or in the mode ``batch`` one call per batch."""

from __future__ import annotations

from typing import Any

import uvloop
from adapter import BATCH, Book, PlainRedis, batches, handle, payload, serve, until_settled
from faststream.redis import RedisBroker, StreamSub

STREAM = "bench"
GROUP = "workers"


async def handle_batch(messages: list[dict[str, Any]]) -> None:
    """Handle a batch."""
    for message in messages:
        Book.current.note(message["number"], message["sent"])


class OnFastStream:
    """An entry for FastStream. The producer's broker has no subscribers; the worker adds one to its broker."""

    packages = ("faststream", "redis", "hiredis", "uvloop")

    def __init__(self, mode: str, url: str) -> None:
        self._mode, self._url = mode, url
        self._plain = PlainRedis(url)

    async def open(self) -> None:
        """Connect to Redis."""
        self._broker = RedisBroker(self._url, socket_timeout=60, logger=None)
        self._client = await self._broker.connect()

    async def publish(self, number: int, sent: float) -> None:
        """Publish one message."""
        await self._broker.publish(payload(number, sent), stream=STREAM)

    async def publish_many(self, numbers: range) -> None:
        """Publish through a pipeline of FastStream's Redis client, as its documentation shows."""
        for batch in batches(numbers):
            async with self._client.pipeline(transaction=False) as pipeline:
                for number in batch:
                    await self._broker.publish(payload(number), stream=STREAM, pipeline=pipeline)
                await pipeline.execute()

    async def work(self, book: Book) -> None:
        """Run a subscriber until all tasks are handled and settled. Its group starts at the beginning of the stream."""
        full = book.waiter()
        broker = RedisBroker(self._url, socket_timeout=60, logger=None)
        batch = self._mode == "batch"
        where = StreamSub(
            STREAM, group=GROUP, consumer="one", last_id=">", max_records=BATCH, batch=batch
        )
        broker.subscriber(stream=where)(handle_batch if batch else handle)
        self._plain.make_group(STREAM, GROUP)
        await broker.start()
        await until_settled(self, full)
        await broker.stop()

    def left(self) -> int:
        """Return the number of entries not read or not acknowledged, because FastStream deletes none."""
        return self._plain.group_left(STREAM, GROUP)

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._broker.stop()


if __name__ == "__main__":
    serve(OnFastStream, uvloop.new_event_loop)
