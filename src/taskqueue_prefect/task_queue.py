"""The classes that replace the queue of Prefect's server, with the methods that it uses.

Two sides call them. Requests enqueue runs, each in its own context. The handler of a worker's socket creates one
`MultiQueue` and gets one run after another from it; calls of the handler are recognised by a context variable: see
`taskqueue_prefect.delivery`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskqueue_prefect import enqueue as scheduling
from taskqueue_prefect.context import Host
from taskqueue_prefect.delivery import SharedQueueDelivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefect.server.schemas.core import TaskRun


class TaskQueue:
    """The runs of one task."""

    def __init__(self, task_key: str, *_sizes: int) -> None:
        """Do nothing: limits are in the queue's settings."""
        self.task_key = task_key

    @classmethod
    def for_key(cls, task_key: str) -> TaskQueue:
        """Return the queue of a task."""
        return cls(task_key)

    @classmethod
    async def enqueue(cls, task_run: TaskRun) -> None:
        """Enqueue a run."""
        await scheduling.put(Host.of_this_loop(), task_run)

    @classmethod
    def configure_task_key(
        cls, task_key: str, scheduled_size: int | None = None, retry_size: int | None = None
    ) -> None:
        """Do nothing: limits are in the queue's settings."""

    @classmethod
    def reset(cls) -> None:
        """Do nothing: queues are not stored in the process."""

    async def put(self, task_run: TaskRun) -> None:
        """Enqueue a run."""
        await self.enqueue(task_run)

    async def retry(self, task_run: TaskRun) -> None:
        """Release a run that a worker was sent, or schedule the next attempt of one.

        Prefect calls this for both. The first call comes from a socket's handler, the second from a request.
        """
        socket = SharedQueueDelivery.of_this_context()
        if socket is not None:
            await socket.release()
        else:
            await scheduling.schedule(Host.of_this_loop(), task_run)


class MultiQueue:
    """The runs for one worker's socket, created by the socket's handler."""

    def __init__(self, task_keys: Sequence[str]) -> None:
        """Take the keys that the worker has subscribed to, unchecked. The socket ends with the handler."""
        self._socket = SharedQueueDelivery(Host.of_this_loop(), task_keys)

    async def get(self) -> TaskRun:
        """Wait for the next run. Cancelling it loses nothing."""
        return await self._socket.next()
