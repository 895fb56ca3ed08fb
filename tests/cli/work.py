"""Workers for the tests of ``taskqueue worker``."""

from collections.abc import Iterable

from taskqueue_memory import MemoryBackend
from taskqueue_memory.subscription import MemorySubscription
from taskqueue_worker import Context, Quarantine, Worker

worker = Worker("http://127.0.0.1:1", concurrency=2)
failing = Worker(quarantine=lambda: Quarantine(2, cooldown=0.05, probes=1))


@worker.task("double")
def double(n: int) -> int:
    """Double."""
    return 2 * n


@worker.task("who")
async def who(context: Context) -> dict[str, object]:
    """Tell the attempt."""
    return {"attempt": context.attempt}


@failing.task("fails")
def fails() -> None:
    """Fail."""
    raise ValueError("always")


class Telling(MemoryBackend):
    """A backend that prints when its worker has begun to serve."""

    def subscribe(self, keys: Iterable[str], consumer: str) -> MemorySubscription:
        """Print it."""
        print("subscribed", flush=True)  # noqa: T201 - the test reads it
        return super().subscribe(keys, consumer)
