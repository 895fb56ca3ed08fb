"""What a task waits for: other tasks, and how these must end. The capability ``after`` of a backend keeps it."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_choice, check_name, kind_of

__all__ = ["After", "OnDead", "TaskRef", "When"]

When = Literal["done", "ended", "failed"]
OnDead = Literal["hold", "cancel"]
WHEN: tuple[When, ...] = get_args(When)
ON_DEAD: tuple[OnDead, ...] = get_args(OnDead)
INPUTS_TOO_LARGE = "inputs_too_large"
"""reason of a dead letter whose parents' results are larger together than `Limits.payload`"""
PARENT_ENDED = "parent_ended"
"""reason of a task that was cancelled because its condition can no longer be met"""
UNKNOWN_PARENT = "unknown_parent"
"""reason of a task that was cancelled because the store does not know a task that it waits for"""
PARENTS_SHOWN = 20
"""maximum number of parents in `TaskStatus.waits_for`"""


class TaskRef(msgspec.Struct, frozen=True):
    """The name of a task: its queue and its id. Raises `InvalidInput`.

    >>> TaskRef("shop.resize", "cat-320")
    TaskRef(key='shop.resize', task_id='cat-320')
    """

    key: str
    """the name of the queue"""
    task_id: str

    def __post_init__(self) -> None:
        check_name("key", self.key)
        check_name("id", self.task_id)


class After(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tasks that a task waits for, its parents, and how they must end. Raises `InvalidInput`.

    >>> resized = TaskRef("shop.resize", "cat-320")
    >>> task = Task(key="shop.notify", after=After(tasks=(resized,), inputs=(0,)))
    """

    tasks: tuple[TaskRef, ...]
    """the parents: 1 to 1000 (`Limits.parents`), each of them once"""
    when: When = "done"
    """the condition on which the task becomes available

    ``done``: all parents are done. ``ended``: all parents have ended, in whatever way; a dead letter counts as ended.
    ``failed``: one parent is dead, expired, cancelled or discarded. If the condition can no longer be met, the task is
    cancelled.
    """
    on_dead: OnDead = "hold"
    """with ``done``: whether a parent that is a dead letter holds the task until it is redriven or discarded, or
    ``cancel`` it at once"""
    inputs: tuple[int, ...] = ()
    """positions in ``tasks`` of the parents whose results are delivered with the task, in this order; each once"""

    def __post_init__(self) -> None:
        _check_parents(self.tasks)
        check_choice("after.when", self.when, WHEN)
        check_choice("after.on_dead", self.on_dead, ON_DEAD)
        _check_inputs(self.inputs, len(self.tasks))


def check_after(after: object, batch: object, ref: TaskRef) -> None:
    """Check the fields ``after`` and ``batch`` of the task with the name ``ref``. Raises `InvalidInput`."""
    if not isinstance(after, After | None):
        raise InvalidInput("after", kind_of(after), "an After, or None")
    if not isinstance(batch, TaskRef | None):
        raise InvalidInput("batch", kind_of(batch), "a TaskRef, or None")
    if after is not None and batch == ref:
        raise InvalidInput(
            "after", "parents of a batch", "None, because a batch waits for its members"
        )
    if after is not None and ref in after.tasks:
        raise InvalidInput("after.tasks", "the task itself", "other tasks")


def _check_parents(tasks: object) -> None:
    if not isinstance(tasks, tuple) or not 1 <= len(tasks) <= LIMITS.parents:
        got, allowed = kind_of(tasks), f"a tuple of 1 to {LIMITS.parents} TaskRef"
        raise InvalidInput("after.tasks", got, allowed)
    if not all(isinstance(parent, TaskRef) for parent in tasks):
        raise InvalidInput("after.tasks", "an item that is no TaskRef", "only TaskRef")
    if len(set(tasks)) < len(tasks):
        raise InvalidInput("after.tasks", "the same task twice", "each task once")


def _check_inputs(inputs: object, parents: int) -> None:
    if not isinstance(inputs, tuple) or not all(
        type(place) is int and 0 <= place < parents for place in inputs
    ):
        allowed = f"a tuple of whole numbers from 0 to {parents - 1}, positions in after.tasks"
        raise InvalidInput("after.inputs", kind_of(inputs), allowed)
    if len(set(inputs)) < len(inputs):
        raise InvalidInput("after.inputs", "the same position twice", "each position once")
