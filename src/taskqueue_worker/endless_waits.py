"""Finding waits that cannot end: for a task that cannot start because the calls that wait hold its queue's room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol, TypeAlias

from taskqueue_core.application.errors import WouldBlock
from taskqueue_core.capabilities import control_of
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import State

TaskName: TypeAlias = tuple[str, str]
"""the key and the id of a task"""


class WaitingCall(Protocol):
    """A call of a handler that runs in this worker."""

    @property
    def tasks(self) -> tuple[TaskName, ...]:
        """The tasks of the call."""

    @property
    def waits(self) -> Mapping[TaskName, int]:
        """The tasks for which it waits."""


async def check_wait(
    queue: Queue,
    task: TaskName,
    call: WaitingCall,
    owners: Mapping[TaskName, WaitingCall],
    waiting: Mapping[str, int],
) -> None:
    """Raise `WouldBlock` if the wait of ``call`` for ``task`` cannot end.

    ``owners`` are the calls that run in this worker, by their tasks; ``waiting`` is the number of tasks of each key
    whose calls wait. A wait cannot end if `max_inflight` of the task's
    queue is reached by calls of this worker whose waits cannot end either, or if the task is one of such a call.
    """
    key, task_id = task
    limits: dict[str, int | None] = {}
    if task in owners:
        if not owners[task].waits:
            return
    elif not waiting.get(key):
        return
    else:
        limit = limits[key] = await _max_inflight(queue, key)
        if limit is None or waiting.get(key, 0) < limit:
            return
    calls = set(owners.values())
    for waited in {name for each in calls for name, _ in each.waits} - limits.keys():
        limits[waited] = await _max_inflight(queue, waited)
    if not _is_stuck(task, call, owners, limits):
        return
    status = await queue.status(key, task_id)
    # A task that another worker runs is not held up, and one that has ended needs no room.
    live = task in owners or (
        status is not None and status.state in (State.WAITING, State.SCHEDULED)
    )
    if live and _is_stuck(task, call, owners, limits):
        raise WouldBlock(
            f"task {task_id} of {key} cannot end while this handler waits for it: handlers that wait for one another "
            f"have reached max_inflight of a queue (of {key}: {limits.get(key)}). Raise the limit, or let the handler "
            "of the other task publish what follows"
        )


async def _max_inflight(queue: Queue, key: str) -> int | None:
    try:
        return (await control_of(queue.backend).settings(key)).max_inflight
    except (
        TaskQueueError
    ):  # for example a token without the permission; the wait itself reports an outage
        return None


def _is_stuck(
    task: TaskName,
    call: WaitingCall,
    owners: Mapping[TaskName, WaitingCall],
    limits: Mapping[str, int | None],
) -> bool:
    """Return whether ``call`` waits for ever for ``task``: assume that all waits do, and remove those that can end."""
    stuck = {each for each in (call, *owners.values()) if each.waits}

    def is_blocked(name: TaskName, held: Mapping[str, int]) -> bool:
        if name in owners:
            return owners[name] in stuck
        limit = limits.get(name[0])
        return limit is not None and held[name[0]] >= limit

    while True:
        held = Counter(key for each in stuck for key, _ in each.tasks)
        can_end = {each for each in stuck if not any(is_blocked(name, held) for name in each.waits)}
        if not can_end:
            return call in stuck and is_blocked(task, held)
        stuck -= can_end
