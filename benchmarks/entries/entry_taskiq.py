"""The library taskiq with the stream broker of taskiq-redis; results are not stored."""

from __future__ import annotations

import asyncio

import uvloop
from adapter import BATCH, Book, PlainRedis, batches, handle, payload, serve, until_settled
from taskiq.receiver import Receiver
from taskiq_redis import RedisStreamBroker

AT_A_TIME = 100


class OnTaskiq:
    """An entry for taskiq with one stream. A message is acknowledged after its result has been dropped."""

    packages = ("taskiq", "taskiq-redis", "redis", "hiredis", "uvloop")

    def __init__(self, _: str, url: str) -> None:
        self._url = url
        self._plain = PlainRedis(url)

    async def open(self) -> None:
        """Connect to Redis, and create the consumer group at the beginning of the stream."""
        self._broker = RedisStreamBroker(
            self._url, queue_name="bench", consumer_id="0", xread_count=BATCH, socket_timeout=60
        )
        self._task = self._broker.register_task(handle, task_name="handle")
        await self._broker.startup()

    async def publish(self, number: int, sent: float) -> None:
        """Send one task."""
        await self._task.kiq(**payload(number, sent))

    async def publish_many(self, numbers: range) -> None:
        """Send the tasks of each batch concurrently, because taskiq has no bulk call."""
        for batch in batches(numbers):
            await asyncio.gather(*(self._task.kiq(**payload(number)) for number in batch))

    async def work(self, book: Book) -> None:
        """Run taskiq's receiver until all tasks are handled and settled."""
        full, finish = book.waiter(), asyncio.Event()
        receiver = Receiver(
            self._broker, max_async_tasks=AT_A_TIME, max_prefetch=BATCH, run_startup=False
        )
        running = asyncio.create_task(receiver.listen(finish))
        await until_settled(self, full)
        finish.set()
        await running

    def left(self) -> int:
        """Return the number of entries not read or not acknowledged, because taskiq deletes none."""
        return self._plain.group_left("bench", "taskiq")

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._broker.shutdown()


if __name__ == "__main__":
    serve(OnTaskiq, uvloop.new_event_loop)
