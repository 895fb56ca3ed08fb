"""Workers for the tests of ``taskqueue worker``."""

from collections.abc import Iterable

from taskqueue_core import QueueLimits, RetryPolicy, Tasks
from taskqueue_memory import MemoryBackend
from taskqueue_memory.subscription import MemorySubscription
from taskqueue_worker import Context, Quarantine, Worker

shop = Tasks(prefix="shop.")
worker = Worker(url="http://127.0.0.1:1", concurrency=2)
failing = Worker(quarantine=lambda: Quarantine(2, cooldown=0.05, probes=1))


@shop.task(timeout=30, limits=QueueLimits(rate="100/1m"), retry=RetryPolicy(delays=(5, 60)))
def resize(image: str, width: int = 320) -> None:
    """Do nothing."""


@shop.task(queue="images")
def crop(image: str) -> None:
    """Do nothing."""


other = Tasks(prefix="other.")
contradicting = Worker(shop, other, url="http://127.0.0.1:1")


@other.task(queue="shop.resize", timeout=60)
def enlarge(image: str) -> None:
    """Share a queue with a task of another registry, which declares another timeout."""


@worker.task("double")
def double(n: int) -> int:
    """Return twice the number."""
    return 2 * n


@worker.task("who")
async def who(context: Context) -> dict[str, object]:
    """Return the attempt number of the task."""
    return {"attempt": context.attempt}


@failing.task("fails")
def fails() -> None:
    """Raise an error."""
    raise ValueError("always")


class Telling(MemoryBackend):
    """A backend that prints a line when its worker subscribes."""

    def subscribe(self, keys: Iterable[str], consumer: str) -> MemorySubscription:
        """Print a line and return the subscription."""
        print("subscribed", flush=True)  # noqa: T201 - the test waits for this line
        return super().subscribe(keys, consumer)
