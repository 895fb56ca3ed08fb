"""dramatiq: threads, no event loop."""

from __future__ import annotations

import os

# Read when it is imported; the default, twice the threads, drains five times slower.
os.environ["dramatiq_queue_prefetch"] = "1000"  # noqa: SIM112 - its own spelling

import dramatiq
from adapter import Book, PlainRedis, handle_in_thread, payload, run_threads_until_settled, serve
from dramatiq.brokers.redis import RedisBroker

THREADS = 16
QUEUE = "dramatiq:default"


class OnDramatiq:
    """Its default middleware, without results and without its metrics server."""

    packages = ("dramatiq", "redis", "hiredis")

    def __init__(self, _: str, url: str) -> None:
        self._plain = PlainRedis(url)
        self._broker = RedisBroker(url=url)
        dramatiq.set_broker(self._broker)
        self._actor = dramatiq.actor(handle_in_thread, actor_name="handle")

    def publish(self, number: int, sent: float) -> None:
        """Send one message."""
        self._actor.send(**payload(number, sent))

    def publish_many(self, numbers: range) -> None:
        """Send one by one: it has no bulk call."""
        for number in numbers:
            self._actor.send(**payload(number))

    def work(self, book: Book) -> None:
        """Run its worker until all is handled."""
        worker = dramatiq.Worker(self._broker, worker_threads=THREADS)
        run_threads_until_settled(self, book, worker)

    def left(self) -> int:
        """Messages in its hash: an acknowledged one is removed."""
        return int(self._plain("HLEN", f"{QUEUE}.msgs"))


if __name__ == "__main__":
    serve(OnDramatiq)
