"""taskiq with the stream broker of taskiq-redis, without results."""

from __future__ import annotations

import asyncio

import uvloop
from adapter import BATCH, Book, PlainRedis, batches, handle, payload, serve, until_settled
from taskiq.receiver import Receiver
from taskiq_redis import RedisStreamBroker

AT_A_TIME = 100


class OnTaskiq:
    """One stream; a message is acknowledged once its (dropped) result is saved, the default."""

    packages = ("taskiq", "taskiq-redis", "redis", "hiredis", "uvloop")

    def __init__(self, _: str, url: str) -> None:
        self._url = url
        self._plain = PlainRedis(url)

    async def open(self) -> None:
        """Connect, and declare the group from the stream's beginning."""
        self._broker = RedisStreamBroker(
            self._url, queue_name="bench", consumer_id="0", xread_count=BATCH, socket_timeout=60
        )
        self._task = self._broker.register_task(handle, task_name="handle")
        await self._broker.startup()

    async def publish(self, number: int, sent: float) -> None:
        """Kick one task."""
        await self._task.kiq(**payload(number, sent))

    async def publish_many(self, numbers: range) -> None:
        """Kick batches concurrently: it has no bulk call."""
        for batch in batches(numbers):
            await asyncio.gather(*(self._task.kiq(**payload(number)) for number in batch))

    async def work(self, book: Book) -> None:
        """Run its receiver until all is handled."""
        full, finish = book.waiter(), asyncio.Event()
        receiver = Receiver(
            self._broker, max_async_tasks=AT_A_TIME, max_prefetch=BATCH, run_startup=False
        )
        running = asyncio.create_task(receiver.listen(finish))
        await until_settled(self, full)
        finish.set()
        await running

    def left(self) -> int:
        """Entries not read or not acknowledged: it deletes none."""
        return self._plain.group_left("bench", "taskiq")

    async def close(self) -> None:
        """Close its connections."""
        await self._broker.shutdown()


if __name__ == "__main__":
    serve(OnTaskiq, uvloop.new_event_loop)
