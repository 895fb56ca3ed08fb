"""Minimal queues on redis-py, with acknowledgements and no other guarantee: the limit of what Redis allows.

Modes: ``p100`` pipelines batches of 100 messages, ``p1`` sends one message at a time, ``task`` is ``p100`` with one
asyncio task per message, ``lua`` publishes and settles a batch with one script.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import uvloop
from adapter import BATCH, Book, PlainRedis, batches, payload, serve
from redis.asyncio import Redis

STREAM = "floor"
GROUP = "workers"
BLOCK = 5000
PUBLISH = "for i = 1, #ARGV do redis.call('XADD', KEYS[1], '*', 'd', ARGV[i]) end return #ARGV"
SETTLE = """redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 2))
return redis.call('XDEL', KEYS[1], unpack(ARGV, 2))"""


class Floor:
    """An entry that uses one stream with one consumer group and one consumer."""

    packages = ("redis", "hiredis", "uvloop", "orjson")

    def __init__(self, mode: str, url: str) -> None:
        self._mode = mode
        self._redis: Any = Redis.from_url(url, socket_timeout=60)
        self._plain = PlainRedis(url)
        self._batch = 1 if mode == "p1" else BATCH
        self._publish_script = self._redis.register_script(PUBLISH)
        self._settle_script = self._redis.register_script(SETTLE)

    async def publish(self, number: int, sent: float) -> None:
        """Add one entry to the stream."""
        await self._redis.xadd(STREAM, {"d": orjson.dumps(payload(number, sent))})

    async def publish_many(self, numbers: range) -> None:
        """Publish with a script, with pipelines of XADD, or one entry after another, depending on the mode."""
        if self._mode == "p1":
            for number in numbers:
                await self.publish(number, 0.0)
            return
        for batch in batches(numbers):
            texts = [orjson.dumps(payload(number)) for number in batch]
            if self._mode == "lua":
                await self._publish_script([STREAM], texts)
                continue
            pipeline = self._redis.pipeline(transaction=False)
            for text in texts:
                pipeline.xadd(STREAM, {"d": text})
            await pipeline.execute()

    async def work(self, book: Book) -> None:
        """Repeatedly read a batch, handle it, and acknowledge and delete its entries."""
        self._plain.make_group(STREAM, GROUP)
        full = book.waiter()
        loop = asyncio.create_task(self._drain(book))
        await asyncio.wait({loop, asyncio.create_task(full.wait())}, return_when="FIRST_COMPLETED")
        if len(book.numbers) < book.expected:
            loop.cancel()
        await asyncio.wait({loop})
        if not loop.cancelled():
            loop.result()

    async def _drain(self, book: Book) -> None:
        streams = {STREAM: ">"}
        if not book.began and self._plain("XLEN", STREAM):
            book.begin()
        while len(book.numbers) < book.expected:
            answer = await self._redis.xreadgroup(
                GROUP, "one", streams, count=self._batch, block=BLOCK
            )
            if not answer:
                continue
            entries = answer[0][1]
            if self._mode == "task":
                await asyncio.gather(*(_handle(book, fields) for _, fields in entries))
            else:
                for _, fields in entries:
                    task = orjson.loads(fields[b"d"])
                    book.note(task["number"], task["sent"])
            await self._settle([entry for entry, _ in entries])
            book.end()  # the last acknowledgement belongs to the measurement

    async def _settle(self, entries: list[bytes]) -> None:
        if self._mode == "p1":
            await self._redis.xack(STREAM, GROUP, *entries)
            await self._redis.xdel(STREAM, *entries)
        elif self._mode == "lua":
            await self._settle_script([STREAM], [GROUP, *entries])
        else:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.xack(STREAM, GROUP, *entries)
            pipeline.xdel(STREAM, *entries)
            await pipeline.execute()

    async def cycles(self, count: int, per_cycle: int, keys: int, busy: int) -> dict[str, float]:  # noqa: ARG002 - one stream
        """Publish and drain repeatedly; return the total time of the drains."""
        self._plain.make_group(STREAM, GROUP)
        seconds = cpu = 0.0
        for _ in range(count):
            await self.publish_many(range(per_cycle))
            book = Book(per_cycle)
            await self._drain(book)
            figures = book.figures()
            seconds, cpu = seconds + figures["seconds"], cpu + figures["cpu"]
        return {"seconds": seconds, "cpu": cpu, "handled": count * per_cycle}

    def left(self) -> int:
        """Return the number of entries in the stream, which contains no settled entries."""
        return int(self._plain("XLEN", STREAM))

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


async def _handle(book: Book, fields: dict[bytes, bytes]) -> None:
    task = orjson.loads(fields[b"d"])
    book.note(task["number"], task["sent"])


if __name__ == "__main__":
    serve(Floor, uvloop.new_event_loop)
