"""What a drain has run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Any

import msgspec

from taskqueue_core.application.task_function import TaskFunction
from taskqueue_core.errors import InvalidInput, TaskQueueError
from taskqueue_core.policy_model import nearest_first
from taskqueue_core.tasks import DeadLetter, Expired


class NotIdle(TaskQueueError):
    """A drain ran more tasks than its ``limit``, or a handler waits for a task that is not due. It names the tasks.

    >>> await place_order(18)
    >>> try:
    ...     await taskqueue.drain(limit=1)
    ... except NotIdle as error:
    ...     print(error.code)
    not_idle
    """

    code = "not_idle"


class NotDrained(TaskQueueError, TimeoutError):
    """A test waits for a task that cannot end, because no drain is running. A drain must come first.

    >>> handle = await charge.publish(18)
    >>> try:
    ...     await handle.result()
    ... except NotDrained as error:
    ...     print(error)
    task ... of shop.charge is waiting, and no drain is running: call 'await taskqueue.drain()' ...
    """

    code = "not_drained"


class End(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    REPEATED = "repeated"
    """it succeeded, and its task was delivered again, because the drain delivers twice"""
    FAILED = "failed"
    """by an exception or a timeout: the next attempt is scheduled, or `Run.dead` is set"""
    RETRY = "retry"
    """the handler asked for another attempt, which is scheduled, or `Run.dead` is set"""
    SNOOZED = "snoozed"
    """the handler asked to run again later"""
    REJECTED = "rejected"
    """the task is a dead letter: the handler asked for that, or the payload or the result does not fit"""
    RELEASED = "released"
    """the worker stopped"""
    LOST = "lost"
    """the worker crashed"""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a task.

    >>> [(run.task, run.attempt, str(run.end)) for run in (await taskqueue.drain()).runs]
    [('shop.charge', 1, 'done')]
    """

    task: str
    """name of the task"""
    id: str
    """id of the task"""
    attempt: int
    """number of the attempt, from 1"""
    end: End
    """how it ended"""
    error: BaseException | None = None
    """the exception, if it failed"""
    dead: DeadLetter | None = None
    """the dead letter that the task has become: its ``reason`` and its ``history`` of failures"""


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What `TestQueue.drain` or `TestQueue.advance` has run.

    >>> (await taskqueue.drain()).count("shop.charge")
    1
    """

    names: frozenset[str]
    """the names of all tasks of the registry"""
    runs: tuple[Run, ...] = ()
    """the attempts, in the order in which they ended"""
    expired: tuple[Expired, ...] = ()
    """the tasks whose deadlines passed"""

    @property
    def errors(self) -> list[BaseException]:
        """The exceptions of the failed attempts, in order."""
        return [run.error for run in self.runs if run.error is not None]

    @property
    def dead(self) -> list[Run]:
        """The runs that made dead letters, in order; each has the dead letter in `Run.dead`.

        >>> handle = await refund.publish(17)
        >>> [(run.task, run.dead.reason) for run in (await taskqueue.drain()).dead]
        [('shop.refund', 'no_receipt')]
        """
        return [run for run in self.runs if run.dead is not None]

    def count(
        self, task: TaskFunction[..., Any] | str | None = None, end: End | str | None = None
    ) -> int:
        """Return the number of attempts: all of them, those of this task, those that ended so.

        ``task`` is a task, or its name. Raises `InvalidInput` for a task or an end that does not exist.
        """
        name = task.name if isinstance(task, TaskFunction) else task
        ends = [each.value for each in End]
        if name is not None:
            check_name(name, self.names)
        if end is not None and end not in ends:
            raise InvalidInput("end", f"{end!r}", ", ".join(ends))
        return sum(name in (None, run.task) and end in (None, run.end) for run in self.runs)


def check_name(name: str, names: Collection[str]) -> None:
    """Raise `InvalidInput` unless a task is among those of a `TestQueue`, whose names are ``names``."""
    if name not in names:
        known = nearest_first(name, sorted(names)) or "none"
        raise InvalidInput(
            "task",
            f"{name!r}",
            f"the tasks of this TestQueue: {known} (tasks.include(other_tasks) adds those of another registry)",
        )


def most_common(names: Iterable[str]) -> str:
    """Return the most frequent names, and how often each occurs."""
    return ", ".join(f"{name} ({number})" for name, number in Counter(names).most_common(5))
