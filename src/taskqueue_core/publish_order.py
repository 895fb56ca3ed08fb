"""The order in which the tasks of one call are published: no task before those that it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from taskqueue_core.after import TaskRef
from taskqueue_core.tasks import Confirmation, Published, Refusal, Task

__all__ = ["in_parts", "refused_with_parent"]


def in_parts(tasks: Sequence[Task], most: int) -> Iterator[Sequence[int]]:
    """Yield the positions of tasks in parts of at most ``most``, none of which has a task and one of its parents.

    A task comes in a later part than its parents that precede it in ``tasks``; otherwise the order stays the same.
    """
    for level in _levels(tasks):
        for start in range(0, len(level), most):
            yield level[start : start + most]


def _levels(tasks: Sequence[Task]) -> list[Sequence[int]]:
    if not any(task.after for task in tasks):
        return [range(len(tasks))]
    depths: dict[TaskRef, int] = {}
    levels: list[list[int]] = []
    for place, task in enumerate(tasks):
        parents = () if task.after is None else task.after.tasks
        depth = max((depths[each] + 1 for each in parents if each in depths), default=0)
        depths[TaskRef(task.key, task.id)] = depth
        while len(levels) <= depth:
            levels.append([])
        levels[depth].append(place)
    return list(levels)


def refused_with_parent(task: Task, absent: Mapping[TaskRef, Confirmation]) -> Confirmation | None:
    """Return the refusal of a task that waits for one that the store does not have; otherwise ``None``.

    ``absent``: what the store answered for tasks of the same call that it does not have.
    """
    for parent in () if task.after is None else task.after.tasks:
        if (answer := absent.get(parent)) is not None:
            reason = f"the task {parent.task_id!r} of queue {parent.key!r}, for which it waits, was not stored"
            if answer.existing_id is not None:
                reason += f": {answer.existing_id!r} holds its unique key"
            return Confirmation(
                key=task.key,
                task_id=task.id,
                status=Published.REFUSED,
                code=Refusal.PARENT_REFUSED,
                reason=reason,
                retry_after=answer.retry_after,
            )
    return None
