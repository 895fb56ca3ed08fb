"""The library huey: one thread. A task is removed from the store before it runs, so it runs at most once."""

from __future__ import annotations

from adapter import Book, PlainRedis, handle_in_thread, payload, run_threads_until_settled, serve
from huey import RedisHuey

QUEUE = "huey.redis.bench"


class OnHuey:
    """An entry for huey, without results and without the scheduler."""

    packages = ("huey", "redis", "hiredis")

    def __init__(self, _: str, url: str) -> None:
        self._plain = PlainRedis(url)
        self._huey = RedisHuey("bench", url=url, results=False)
        self._task = self._huey.task(name="handle")(handle_in_thread)

    def publish(self, number: int, sent: float) -> None:
        """Enqueue one task."""
        self._task(**payload(number, sent))

    def publish_many(self, numbers: range) -> None:
        """Enqueue the tasks one after another, because huey has no bulk call."""
        for number in numbers:
            self._task(**payload(number))

    def work(self, book: Book) -> None:
        """Run huey's consumer until all tasks are handled."""
        consumer = self._huey.create_consumer(workers=1, periodic=False, check_worker_health=False)
        run_threads_until_settled(self, book, consumer)

    def left(self) -> int:
        """Return the number of tasks in huey's list."""
        return int(self._plain("LLEN", QUEUE))


if __name__ == "__main__":
    serve(OnHuey)
