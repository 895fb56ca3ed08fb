"""huey: one thread, a task is popped before it runs, so at most once."""

from __future__ import annotations

from adapter import Book, PlainRedis, handle_in_thread, payload, run_threads_until_settled, serve
from huey import RedisHuey

QUEUE = "huey.redis.bench"


class OnHuey:
    """Without results and without its scheduler."""

    packages = ("huey", "redis", "hiredis")

    def __init__(self, _: str, url: str) -> None:
        self._plain = PlainRedis(url)
        self._huey = RedisHuey("bench", url=url, results=False)
        self._task = self._huey.task(name="handle")(handle_in_thread)

    def publish(self, number: int, sent: float) -> None:
        """Enqueue one task."""
        self._task(**payload(number, sent))

    def publish_many(self, numbers: range) -> None:
        """Enqueue one by one: it has no bulk call."""
        for number in numbers:
            self._task(**payload(number))

    def work(self, book: Book) -> None:
        """Run its consumer until all is handled."""
        consumer = self._huey.create_consumer(workers=1, periodic=False, check_worker_health=False)
        run_threads_until_settled(self, book, consumer)

    def left(self) -> int:
        """Tasks in its list."""
        return int(self._plain("LLEN", QUEUE))


if __name__ == "__main__":
    serve(OnHuey)
