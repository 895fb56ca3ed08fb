"""The capability ``listing``: the tasks of a queue by state, tenant, tag, worker and time, page by page.

A store reads the records of a page, and those that a filter skips, of which there is a limit. So a page may have
fewer tasks than were asked for, even none, and still name a next page.

Tags are found if the queue's setting ``index`` names them; each task is indexed by the setting at the time of its
publish. Tasks that have ended are listed while their records exist: for ``dedupe_window``, or as long as the settings
``keep_ended`` and ``keep_ended_most`` say.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from taskqueue_core.tasks import Failure, State, Task, TaskStatus

LOOKED_AT = 3_000
"""maximum number of records that are read for one page, so that a page with a filter takes no longer than others"""
_COUNTED = 10_000
"""number of records after which `count_tagged` counts no more"""
ERROR_CHARACTERS = 200
"""maximum number of characters of the error in a summary"""


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A task as a list shows it, without payload and headers.

    >>> _ = await queue.publish("mail", {"to": "ada"}, id="ada", tags=("user:42",))
    >>> [(task.task_id, task.tags) async for task in queue.tasks("mail", state=State.WAITING)]
    [('ada', ('user:42',))]
    """

    key: str
    """name of the queue"""
    task_id: str
    """id of the task"""
    state: State
    attempt: int = 1
    """number of the attempt that waits or runs, or was the last one; the first is 1"""
    losses: int = 0
    """number of deliveries of this attempt whose consumers were lost"""
    priority: int
    tenant: str | None = None
    ordering_key: str | None = None
    tags: tuple[str, ...] = ()
    updated_at: float
    """time of the last change, as in `TaskStatus`"""
    due_at: float | None = None
    """time at which a scheduled task becomes available; ``None`` in other states"""
    worker_id: str | None = None
    """the worker of a task in flight, of a dead letter, or of one that has ended, if its queue has ``keep_ended``"""
    delivered_at: float | None = None
    """time of the delivery to this worker; ``None`` if the store does not know it, as in `TaskDetail`"""
    error: str | None = None
    """the first `ERROR_CHARACTERS` characters of the error in the task's `TaskStatus`"""


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of tasks.

    >>> page = await queue.tasks("mail", state=State.DEAD).page(limit=20)
    >>> page.tasks, page.next
    ((), None)
    """

    tasks: tuple[TaskSummary, ...] = ()
    next: str | None = None
    """the cursor of the next page, to pass as ``after``; ``None`` after the last page"""
    looked_at: int = 0
    """number of records that were read for this page"""


class TaskDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows of one task.

    >>> handle = await resize.using(tags=("user:42",)).publish("cat.png")
    >>> details = await handle.details()
    >>> details.status.state, details.task.tags
    (<State.WAITING: 'waiting'>, ('user:42',))
    """

    status: TaskStatus
    task: Task
    """the task; the payload and the headers of one that has ended may be missing"""
    published_at: float | None = None
    """time of the publish; ``None`` if the store does not know it"""
    delivered_at: float | None = None
    """time of the last delivery; ``None`` if there was none, or the store does not know it"""
    worker_id: str | None = None
    """the worker of the last delivery; ``None`` if there was none, or the store does not know it"""
    history: tuple[Failure, ...] = ()
    """the most recent failures, oldest first"""


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that were erased, or that would be."""

    tasks: dict[State, int] = {}
    """number of tasks by the state in which they were"""
    more: bool = False
    """whether there are more tasks: repeat the call"""

    @property
    def count(self) -> int:
        """The number of tasks, in all states."""
        return sum(self.tasks.values())


class Listing(Protocol):
    """The tasks of all queues."""

    async def tasks(
        self,
        key: str,
        *,
        state: State | None = None,
        tenant: str | None = None,
        tag: str | None = None,
        worker: str | None = None,
        since: float | None = None,
        until: float | None = None,
        after: str | None = None,
        limit: int = 100,
        newest: bool = False,
    ) -> TaskPage:
        """Return a page of the tasks of a queue that are in a state, or that have a tag.

        ``state`` may be ``None`` with a ``tag`` only, and then means all states. ``worker`` is possible for tasks in
        flight, for dead letters, and for tasks that have ended, if the queue has the setting ``keep_ended``.
        ``since`` and ``until`` are Unix seconds; the list has the tasks whose time is at least ``since`` and before
        ``until``. They are possible for the states whose order is that of a time: when a task ended, became a dead
        letter (both are `TaskSummary.updated_at`), or becomes available (`TaskSummary.due_at`), and not with a tag. A
        store finds the first of these tasks without a look at those before it. ``limit`` is from 1 to 1000.
        ``after`` is the `TaskPage.next` of a page of the same query: the same queue, filters and order.
        Raises `InvalidInput`, which names the argument, for anything else, and for a tag that the setting ``index`` of
        the queue does not name. The list of a queue that was never used is empty.

        The order is:

        * waiting: by priority, highest first; in each priority, released tasks first, then in the order in which they
          became available. Those that wait for their ordering key come last. Fair order does not change this.
        * in flight: by priority, and in the order in which they became available, those that were released in the order
          of their next delivery. With fair order or ordering keys, the release may count instead of that delivery.
        * scheduled: by the time at which they become available
        * blocked: in the order in which they became blocked; dead: in the order in which they became dead letters
        * ended: by the time of the end
        * with a tag: in the order of their publishes

        ``newest`` is the exact reverse.

        A task that stays in the state and at its place, while all pages are read one after another, is on exactly one
        of them (law 11). Tasks that enter or leave it during that time may be on one or on none. No task is there twice
        unless it left its place: it left the state and came back, got another time or other contents, or obtained its
        ordering key; or the order of the queue was changed. In a sharded queue, one shard follows the other.
        """

    async def task(self, key: str, task_id: str) -> TaskDetail | None:
        """Return what the store knows of a task; ``None`` if it is unknown or its record has expired."""

    async def erase(self, key: str, tag: str, *, limit: int = 1000) -> Erasure:
        """Erase tasks that have a tag, at most ``limit``, the first ones in the order of their publishes.

        Those that have not ended are cancelled, also if they are in flight, and dead letters are discarded. Then
        nothing is left of the tasks: no status, payload, result, history, event, tag or unique key. A receipt is
        stale, and a publish with such an id is new. Counters, and a journal, keep what they have. An interrupted
        call has erased some of the tasks, and a repeated one erases the rest. `count_tagged` says what would be
        erased.

        ``limit`` is from 1 to 1000. Raises `InvalidInput` as `tasks` does, also if the setting ``index`` does not name
        the tag. Tasks that were published before ``index`` named it are not found (law 11).
        """


async def count_tagged(listing: Listing, key: str, tag: str) -> Erasure:
    """Return what `Listing.erase` would erase.

    If `Erasure.more` is true, only the first 10,000 tasks were counted.
    """
    tasks, after, counted = dict[State, int](), None, 0
    while counted < _COUNTED:
        page = await listing.tasks(key, tag=tag, after=after, limit=1000)
        for task in page.tasks:
            tasks[task.state] = tasks.get(task.state, 0) + 1
        counted, after = counted + page.looked_at, page.next
        if after is None:
            break
    return Erasure(tasks=tasks, more=after is not None)
