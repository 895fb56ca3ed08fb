"""dramatiq: threads, no event loop."""

from __future__ import annotations

import logging
import os
import threading
import time

# Read when it is imported; the default, twice the threads, drains five times slower.
os.environ["dramatiq_queue_prefetch"] = "1000"  # noqa: SIM112 - its own spelling

import dramatiq
from adapter import Book, PlainRedis, payload, serve
from dramatiq.brokers.redis import RedisBroker

THREADS = 16
QUEUE = "dramatiq:default"
book = Book()


def handle(number: int, sent: float, note: str) -> None:  # noqa: ARG001 - a task's payload
    """Handle one task."""
    book.note(number, sent)


class OnDramatiq:
    """Its default middleware, without results and without its metrics server."""

    packages = ("dramatiq", "redis", "hiredis")

    def __init__(self, _: str, url: str) -> None:
        logging.disable(logging.WARNING)
        self._plain = PlainRedis(url)
        self._broker = RedisBroker(url=url)
        dramatiq.set_broker(self._broker)
        self._actor = dramatiq.actor(handle)

    def publish(self, number: int, sent: float) -> None:
        """Send one message."""
        self._actor.send(**payload(number, sent))

    def publish_many(self, numbers: range) -> None:
        """Send one by one: it has no bulk call."""
        for number in numbers:
            self._actor.send(**payload(number))

    def work(self, on: Book) -> None:
        """Run its worker until all is handled."""
        global book
        book, full = on, threading.Event()
        on.when_full(full.set)
        worker = dramatiq.Worker(self._broker, worker_threads=THREADS)
        worker.start()
        full.wait()
        while self.left():
            time.sleep(0.01)
        worker.stop()

    def left(self) -> int:
        """Messages in its hash: an acknowledged one is removed."""
        return int(self._plain("HLEN", f"{QUEUE}.msgs"))


if __name__ == "__main__":
    serve(OnDramatiq)
