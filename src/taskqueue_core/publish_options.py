"""The options of a publish, and what they mean for a task."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Protocol, TypedDict

from taskqueue_core.after import After, TaskRef
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import duration, kind_of
from taskqueue_core.uniqueness import Debounce, Unique, UniqueKey

__all__ = ["PublishOptions", "TaskName", "after_of", "instant", "ref_of"]


class TaskName(Protocol):
    """What names a task, such as a handle."""

    key: str
    """name of the queue"""
    id: str


class PublishOptions(TypedDict, total=False):
    """The options of a publish, as `taskqueue_core.Queue.publish` describes them."""

    id: str
    priority: int
    delay: float | timedelta
    not_before: float | datetime
    expires_in: float | timedelta
    deadline: float | datetime
    tenant: str
    ordering_key: str
    headers: dict[str, str]
    max_attempts: int
    wait: float
    tags: tuple[str, ...]
    unique: Unique | UniqueKey | None
    debounce: Debounce | None
    after: After | TaskRef | TaskName | Sequence[TaskRef | TaskName] | None


def ref_of(field: str, parent: object) -> TaskRef:
    """Return the name of a task that others wait for. Raises `InvalidInput`."""
    if isinstance(parent, TaskRef):
        return parent
    key, task_id = getattr(parent, "key", None), getattr(parent, "id", None)
    if not isinstance(key, str) or not isinstance(task_id, str):
        raise InvalidInput(
            field, kind_of(parent), "the handle of a task, a TaskRef, or a list of them"
        )
    return TaskRef(key, task_id)


def after_of(value: object) -> After | None:
    """Return what a task waits for: an `After`, or all tasks of a list of handles. Raises `InvalidInput`."""
    if value is None or isinstance(value, After):
        return value
    parents = value if isinstance(value, list | tuple) else [value]
    return After(tasks=tuple([ref_of("after", parent) for parent in parents]))


def instant(
    now: float,
    name: str,
    seconds: float | timedelta | None,
    other: str,
    at: float | datetime | None,
) -> float | None:
    """Return ``at``, or ``now`` plus ``seconds``; ``None`` if neither is given. Raises `InvalidInput` if both are."""
    if seconds is None:
        if isinstance(at, datetime):
            if at.tzinfo is None:
                raise InvalidInput(other, "a datetime without a time zone", "one with a time zone")
            return at.timestamp()
        return at
    if at is not None:
        raise InvalidInput(name, f"both {name} and {other}", "only one of them")
    return now + duration(name, seconds)
