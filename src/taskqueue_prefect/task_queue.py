"""The classes that replace the queue of Prefect's server, with the methods that the server uses.

Requests call these classes to enqueue runs. The handler of a worker's socket creates a `MultiQueue`, and gets one run
after another from it. A context variable shows which of the two is the caller: see `taskqueue_prefect.delivery`.
"""

from __future__ import annotations

from collections.abc import Sequence

from taskqueue_prefect import enqueue as scheduling
from taskqueue_prefect.context import Host
from taskqueue_prefect.delivery import SharedQueueDelivery
from taskqueue_prefect.prefect_types import TaskRun
from taskqueue_prefect.task_runs import StoredRun


class TaskQueue:
    """The queue for the runs of one task. Its capacity is in the queue's settings, not in the arguments."""

    def __init__(self, task_key: str, *_sizes: int) -> None:
        self.task_key = task_key

    @classmethod
    def for_key(cls, task_key: str) -> TaskQueue:
        """Return the queue of a task."""
        return cls(task_key)

    @classmethod
    async def enqueue(cls, task_run: TaskRun) -> None:
        """Enqueue a run. Raises HTTP 503 if the store is unavailable or the queue is full."""
        await scheduling.put(Host.of_this_loop(), task_run)

    @classmethod
    def configure_task_key(
        cls, task_key: str, scheduled_size: int | None = None, retry_size: int | None = None
    ) -> None:
        """Do nothing: the capacity is in the queue's settings."""

    @classmethod
    def reset(cls) -> None:
        """Do nothing: queues are not stored in the process."""

    async def put(self, task_run: TaskRun) -> None:
        """Enqueue a run. Raises HTTP 503 if the store is unavailable or the queue is full."""
        await self.enqueue(task_run)

    async def retry(self, task_run: TaskRun) -> None:
        """Release a run that could not be sent, or schedule the next attempt of a run.

        Prefect calls this method from a socket's handler to release a run, and from a request to schedule an attempt.
        """
        socket = SharedQueueDelivery.of_this_context()
        if socket is not None:
            await socket.release()
        else:
            await scheduling.schedule(Host.of_this_loop(), task_run)


class MultiQueue:
    """A source of runs for one worker's socket. The socket's handler creates it."""

    def __init__(self, task_keys: Sequence[str]) -> None:
        self._socket = SharedQueueDelivery(Host.of_this_loop(), task_keys)

    async def get(self) -> StoredRun:
        """Wait for the next run, and return it. Cancelling the call loses no run."""
        return await self._socket.next()
