"""Batches: tasks without a limit on their number, and callbacks at their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from taskqueue_core.after import After, TaskRef, When
from taskqueue_core.application.call import Call, DeclaredTask
from taskqueue_core.application.handles import Handle, handled_id
from taskqueue_core.application.members import member_results, tag_of
from taskqueue_core.application.publishing import checked_calls, publish_together
from taskqueue_core.authoring.unsupported import field_checks
from taskqueue_core.capabilities import dependencies_of
from taskqueue_core.confirmations import stored
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, State, Task, new_id

R = TypeVar("R")
_LONGEST = 190
"""maximum number of characters of the id of a batch; those of its callbacks are this one and a word"""


class Batch:
    """Tasks without a limit on their number, its members, and callbacks that run when all members have ended.

    ``then`` runs if all members are done, ``failed`` if one of them was cancelled, expired or discarded, and ``ended``
    in any case. A member that is a dead letter holds the batch until it is redriven or discarded. The store counts the
    members, and keeps no list of them. The batch is a task itself, in the queue of the first callback.

    >>> batch = Batch(then=resize.call("all.png"))
    >>> handles = await batch.add(resize.call("cat.png"), resize.call("dog.png"))
    >>> await batch.close()
    >>> (await batch.wait(timeout=30)).value
    'done'
    """

    def __init__(
        self,
        *,
        then: Call[Any] | None = None,
        failed: Call[Any] | None = None,
        ended: Call[Any] | None = None,
        id: str | None = None,  # noqa: A002 - as in `Task`
    ) -> None:
        """Create a batch, which is stored with its first member. ``id``: by default a random one.

        Raises `InvalidInput` without a callback, or for an id that is not allowed.
        """
        given: dict[When, tuple[str, Call[Any] | None]] = {
            "done": ("then", then),
            "failed": ("failed", failed),
            "ended": ("ended", ended),
        }
        self._callbacks = [
            (when, name, call) for when, (name, call) in given.items() if call is not None
        ]
        if not self._callbacks:
            raise InvalidInput("then", "no callback", "a call for one of then, failed and ended")
        for _, name, call in self._callbacks:
            try:
                checked_calls([call])
            except InvalidInput as error:
                allowed = "a call, as in resize.call('cat.png')"
                raise InvalidInput(name, error.got, allowed) from None
        self._first = self._callbacks[0][2].function
        task_id = new_id() if id is None else id
        check_name("id", task_id)
        if len(task_id) > _LONGEST:
            raise InvalidInput("id", f"{len(task_id)} characters", f"at most {_LONGEST}")
        self.ref = TaskRef(self._first.queue, task_id)
        """the name of the batch"""
        self._stored = False

    def __repr__(self) -> str:
        return f"<batch {self.ref.task_id}>"

    async def add(self, *calls: Call[Any]) -> list[Handle[Any]]:
        """Publish members, and return their handles. Any process may add members to a batch with the same id.

        All calls are checked before one of them is stored, so nothing is stored if one is wrong. Raises the errors of
        `taskqueue_core.Queue.publish`: `QueueFull` if the batch is closed, in which case members before the refused one
        may have been added.

        >>> batch = Batch(ended=resize.call("all.png"))
        >>> [handle.key for handle in await batch.add(resize.call("cat.png"))]
        ['shop.resize']
        """
        given, queue = checked_calls(calls), self._first.connection()

        async def encode(call: Call[Any]) -> Task:
            task, tag = await call.task(queue), tag_of(call.function, self.ref.task_id)
            tags = task.tags if tag is None else tuple(dict.fromkeys((*task.tags, tag)))
            return replace(task, batch=self.ref, tags=tags)

        checked = {call: await encode(call) for call in given}
        for check in field_checks(queue.backend.capabilities):
            check(checked.values())

        async def task_of(call: Call[Any]) -> Task:
            # Middleware may send another call, or one twice, as `calls` may have one twice: each send has its own task.
            return checked.pop(call, None) or await encode(call)

        async def send(tasks: Sequence[tuple[int, Task]]) -> Sequence[Confirmation]:
            await self._store(queue)  # not before the members were checked
            return await queue.publish_many([task for _, task in tasks])

        handles: list[Handle[Any]] = []
        for start in range(0, len(given), LIMITS.batch):
            some = given[start : start + LIMITS.batch]
            for call, each in zip(some, await publish_together(some, task_of, send), strict=True):
                function = call.function
                stored(each)
                handles.append(
                    Handle(
                        each.key,
                        handled_id(each),
                        queue,
                        function.read_result,
                        each,
                        encoding=function.encoding,
                    )
                )
        return handles

    async def _store(self, queue: Queue) -> None:
        """Store the batch and its callbacks, unless that was done."""
        if self._stored:
            return
        ref = self.ref
        tasks = [Task(key=ref.key, id=ref.task_id, batch=ref)]
        for when, name, call in self._callbacks:
            task = await call.using(id=f"{ref.task_id}.{name}").task(queue)
            tasks.append(replace(task, after=After(tasks=(ref,), when=when)))
        for confirmation in await queue.publish_many(tasks):
            stored(confirmation)
        self._stored = True

    async def close(self) -> None:
        """Accept no more members. From then on, the batch ends once all of its members have ended. Idempotent.

        >>> batch = Batch(then=resize.call("all.png"))
        >>> await batch.close()
        """
        queue = self._first.connection()
        await self._store(queue)
        await dependencies_of(queue.backend).close(self.ref)

    async def wait(self, timeout: float | None = None) -> State | None:
        """Return the state of the batch at its end: ``done``, or ``cancelled``; ``None`` if it is not known.

        ``timeout`` is in seconds. Raises ``TimeoutError``.
        """
        async with asyncio.timeout(timeout):
            ends = self._first.connection().ends
            status = await ends.wait(self.ref.key, self.ref.task_id)
        return None if status is None else status.state

    def results(self, of: DeclaredTask[R]) -> AsyncIterator[tuple[str, R]]:
        """Yield the ids and the results of the members that are calls of ``of`` and done, in the order of publishes.

        The task is declared with ``index=("batch",)`` and ``keep_ended``, and its declaration was applied before the
        members were added; docs/workflows.md says more. The results are read page by page. Raises `InvalidInput`,
        `ResultGone` for a result that is kept no longer, and `CapabilityMissing` without ``listing``.

        >>> batch = Batch(ended=resize.call("all.png"))
        >>> handles = await batch.add(measure.call("cat.png"), measure.call("cats.png"))
        >>> await batch.close()
        >>> _ = await batch.wait(timeout=30)
        >>> [size async for _, size in batch.results(measure)]
        [7, 8]
        """
        return member_results(of, self.ref.task_id)
