"""huey: one thread, a task is popped before it runs, so at most once."""

from __future__ import annotations

import logging
import threading
import time

from adapter import Book, PlainRedis, payload, serve
from huey import RedisHuey

QUEUE = "huey.redis.bench"
book = Book()


def handle(number: int, sent: float, note: str) -> None:  # noqa: ARG001 - a task's payload
    """Handle one task."""
    book.note(number, sent)


class OnHuey:
    """Without results and without its scheduler."""

    packages = ("huey", "redis", "hiredis")

    def __init__(self, _: str, url: str) -> None:
        logging.disable(logging.WARNING)
        self._plain = PlainRedis(url)
        self._huey = RedisHuey("bench", url=url, results=False)
        self._task = self._huey.task()(handle)

    def publish(self, number: int, sent: float) -> None:
        """Enqueue one task."""
        self._task(**payload(number, sent))

    def publish_many(self, numbers: range) -> None:
        """Enqueue one by one: it has no bulk call."""
        for number in numbers:
            self._task(**payload(number))

    def work(self, on: Book) -> None:
        """Run its consumer until all is handled."""
        global book
        book, full = on, threading.Event()
        on.when_full(full.set)
        consumer = self._huey.create_consumer(workers=1, periodic=False, check_worker_health=False)
        consumer.start()
        full.wait()
        while self.left():
            time.sleep(0.01)
        consumer.stop()

    def left(self) -> int:
        """Tasks in its list."""
        return int(self._plain("LLEN", QUEUE))


if __name__ == "__main__":
    serve(OnHuey)
