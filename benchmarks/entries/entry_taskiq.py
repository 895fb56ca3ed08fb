"""taskiq with the stream broker of taskiq-redis, without results."""

from __future__ import annotations

import asyncio
import logging

import uvloop
from adapter import BATCH, Book, PlainRedis, payload, serve, until_settled
from taskiq.receiver import Receiver
from taskiq_redis import RedisStreamBroker

AT_A_TIME = 100
book = Book()


async def handle(number: int, sent: float, note: str) -> None:  # noqa: ARG001 - a task's payload
    """Handle one task."""
    book.note(number, sent)


class OnTaskiq:
    """One stream; a message is acknowledged once its (dropped) result is saved, the default."""

    packages = ("taskiq", "taskiq-redis", "redis", "hiredis", "uvloop")

    async def open(self, url: str) -> None:
        """Connect, and declare the group from the stream's beginning."""
        self._plain = PlainRedis(url)
        self._broker = RedisStreamBroker(
            url, queue_name="bench", consumer_id="0", xread_count=BATCH, socket_timeout=60
        )
        self._task = self._broker.register_task(handle, task_name="handle")
        await self._broker.startup()

    async def publish(self, number: int, sent: float) -> None:
        """Kick one task."""
        await self._task.kiq(**payload(number, sent))

    async def publish_many(self, numbers: range) -> None:
        """Kick batches concurrently: it has no bulk call."""
        for first in range(numbers.start, numbers.stop, BATCH):
            batch = range(first, min(first + BATCH, numbers.stop))
            await asyncio.gather(*(self._task.kiq(**payload(number)) for number in batch))

    async def work(self, on: Book) -> None:
        """Run its receiver until all is handled."""
        global book
        book, full, finish = on, on.waiter(), asyncio.Event()
        receiver = Receiver(
            self._broker, max_async_tasks=AT_A_TIME, max_prefetch=BATCH, run_startup=False
        )
        running = asyncio.create_task(receiver.listen(finish))
        await full.wait()
        await until_settled(self)
        finish.set()
        await running

    def left(self) -> int:
        """Entries not read or not acknowledged: it deletes none."""
        return self._plain.group_left("bench", "taskiq")

    async def close(self) -> None:
        """Close its connections."""
        await self._broker.shutdown()


async def make(_: str, url: str) -> OnTaskiq:
    """Open it within the loop that it will use."""
    logging.disable(logging.WARNING)
    entry = OnTaskiq()
    await entry.open(url)
    return entry


if __name__ == "__main__":
    serve(make, uvloop.new_event_loop)
