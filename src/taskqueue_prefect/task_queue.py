"""What Prefect's server takes for its queue: the same classes, as far as it uses them.

They are called from two sides. Requests put runs in, each in a context of its own. The handler of a worker's socket
makes one `MultiQueue` and asks it for one run after the other; whatever is called from there is about that socket,
which a context variable tells: see `taskqueue_prefect.delivery`.
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
        """Do nothing: bounds are the queue's settings."""
        self.task_key = task_key

    @classmethod
    def for_key(cls, task_key: str) -> TaskQueue:
        """Return the queue of a task."""
        return cls(task_key)

    @classmethod
    async def enqueue(cls, task_run: TaskRun) -> None:
        """Put a run in."""
        await scheduling.put(Host.of_this_loop(), task_run)

    @classmethod
    def configure_task_key(
        cls, task_key: str, scheduled_size: int | None = None, retry_size: int | None = None
    ) -> None:
        """Do nothing: bounds are the queue's settings."""

    @classmethod
    def reset(cls) -> None:
        """Do nothing: a process keeps none of them."""

    async def put(self, task_run: TaskRun) -> None:
        """Put a run in."""
        await self.enqueue(task_run)

    async def retry(self, task_run: TaskRun) -> None:
        """Hand a run back that a worker was sent, or schedule one that awaits its next attempt: two different things.

        Prefect calls both so. The first comes from a socket's handler, the second from a request.
        """
        socket = SharedQueueDelivery.of_this_context()
        if socket is not None:
            await socket.hand_back()
        else:
            await scheduling.schedule(Host.of_this_loop(), task_run)


class MultiQueue:
    """The runs for one worker's socket. To be made by the handler of that socket."""

    def __init__(self, task_keys: Sequence[str]) -> None:
        """Take what the worker has subscribed to, as it came. The end of the handler is the end of the socket."""
        self._socket = SharedQueueDelivery(Host.of_this_loop(), task_keys)

    async def get(self) -> TaskRun:
        """Wait for the next run. Cancelling it loses nothing."""
        return await self._socket.next()
