"""What a drain has run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from taskqueue_core.application.task_function import TaskFunction
from taskqueue_core.errors import InvalidInput, TaskQueueError
from taskqueue_core.policy_model import nearest_first
from taskqueue_core.tasks import Expired


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


class End(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    REPEATED = "repeated"
    """it succeeded, and its task was delivered again, because the drain delivers twice"""
    FAILED = "failed"
    """by an exception, a timeout or a payload that does not fit: the next attempt is scheduled, or the task is dead"""
    RETRY = "retry"
    """the handler asked for another attempt"""
    SNOOZED = "snoozed"
    """the handler asked to run again later"""
    REJECTED = "rejected"
    """the handler made the task a dead letter"""
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

    def count(
        self, task: TaskFunction[..., Any] | str | None = None, end: End | str | None = None
    ) -> int:
        """Return the number of attempts: all of them, those of this task, those that ended so.

        ``task`` is a task, or its name. Raises `InvalidInput` for a task or an end that does not exist.
        """
        name = task.name if isinstance(task, TaskFunction) else task
        ends = [each.value for each in End]
        if name is not None and name not in self.names:
            raise InvalidInput("task", f"{name!r}", nearest_first(name, sorted(self.names)))
        if end is not None and end not in ends:
            raise InvalidInput("end", f"{end!r}", ", ".join(ends))
        return sum(name in (None, run.task) and end in (None, run.end) for run in self.runs)


def most_common(names: Iterable[str]) -> str:
    """Return the most frequent names, and how often each occurs."""
    return ", ".join(f"{name} ({number})" for name, number in Counter(names).most_common(5))
