"""Lists of the tasks of a queue, for applications."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from msgspec import structs

from taskqueue_core.authoring.listings import Query, check_cursor, checked_page
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import TaskPage, TaskSummary, listing_of
from taskqueue_core.concurrency import BlockingCalls
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of

__all__ = ["OfQueue", "SyncTaskList", "TaskList", "queue_name"]

_PAGE = 500
"""number of tasks that are asked for at once while all of them are iterated over"""


class OfQueue(Protocol):
    """What has a queue: a declared task."""

    queue: str
    """name of the queue"""


class TaskList:
    """The tasks of a queue that `Queue.tasks` finds, read page by page.

    >>> _ = await resize.publish("cat.png")
    >>> [task.attempt async for task in queue.tasks(resize, state=State.WAITING)]
    [1]
    """

    def __init__(self, backend: Backend, query: Query) -> None:
        """Create a list; nothing is read yet. Raises `CapabilityMissing`."""
        self._listing = listing_of(backend)
        self._query = query

    async def __aiter__(self) -> AsyncIterator[TaskSummary]:
        """Yield all tasks. Raises the errors of `page`."""
        after: str | None = None
        while True:
            page = await self.page(after=after, limit=_PAGE)
            for task in page.tasks:
                yield task
            after = page.next
            if after is None:
                return

    async def page(self, *, after: str | None = None, limit: int = 100) -> TaskPage:
        """Return one page of 1 to 1000 tasks. ``after`` is `TaskPage.next` of the page before.

        A page may have fewer tasks, even none, and still name a next one. Raises `InvalidInput` for a cursor of another
        list, for a tag that the queue does not index, and for a worker of ended tasks if the queue does not have the
        setting ``keep_ended``; and `BackendUnavailable`.

        >>> _ = await resize.publish("cat.png")
        >>> page = await queue.tasks(resize, state=State.WAITING).page(limit=20)
        >>> len(page.tasks), page.next
        (1, None)
        """
        if after is not None:
            check_cursor(after)
        filters = structs.asdict(self._query)
        key = filters.pop("key")
        return await self._listing.tasks(key, after=after, limit=checked_page(limit), **filters)


class SyncTaskList:
    """A `TaskList` for code without an event loop, as `SyncQueue.tasks` returns it.

    >>> with connect_sync("taskqueue_memory") as queue:
    ...     confirmation = queue.publish("mail", {"to": "ada"}, id="ada")
    ...     print([task.task_id for task in queue.tasks("mail", state=State.WAITING)])
    ['ada']
    """

    def __init__(self, tasks: TaskList, loop: BlockingCalls) -> None:
        """Make the calls of ``tasks`` in the event loop to which they belong."""
        self._tasks = tasks
        self._loop = loop

    def __iter__(self) -> Iterator[TaskSummary]:
        """Yield all tasks, as `TaskList` does."""
        after: str | None = None
        while True:
            page = self.page(after=after, limit=_PAGE)
            yield from page.tasks
            after = page.next
            if after is None:
                return

    def page(self, *, after: str | None = None, limit: int = 100) -> TaskPage:
        """Return one page; see `TaskList.page`."""
        return self._loop.call(self._tasks.page(after=after, limit=limit))


def queue_name(of: str | OfQueue) -> str:
    """Return the name of the queue whose tasks are listed. Raises `InvalidInput`."""
    key = of if isinstance(of, str) else getattr(of, "queue", None)
    if not isinstance(key, str):
        raise InvalidInput("of", kind_of(of), "the name of a queue, or a declared task")
    return key
