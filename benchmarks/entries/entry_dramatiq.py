"""The library dramatiq: each task is one call in a thread."""

from __future__ import annotations

import os

# dramatiq reads this variable when it is imported. With the default, twice the number of threads, the drain is five
# times slower.
os.environ["dramatiq_queue_prefetch"] = "1000"  # noqa: SIM112 - dramatiq's spelling

import dramatiq
from adapter import Book, PlainRedis, handle_in_thread, payload, run_threads_until_settled, serve
from dramatiq.brokers.redis import RedisBroker

THREADS = 16
QUEUE = "dramatiq:default"


class OnDramatiq:
    """An entry for dramatiq, with the default middleware except the metrics server, and without results."""

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
        """Send the messages one after another, because dramatiq has no bulk call."""
        for number in numbers:
            self._actor.send(**payload(number))

    def work(self, book: Book) -> None:
        """Run dramatiq's worker until all tasks are handled and settled."""
        worker = dramatiq.Worker(self._broker, worker_threads=THREADS)
        run_threads_until_settled(self, book, worker)

    def left(self) -> int:
        """Return the number of messages in dramatiq's hash, which removes acknowledged messages."""
        return int(self._plain("HLEN", f"{QUEUE}.msgs"))


if __name__ == "__main__":
    serve(OnDramatiq)
