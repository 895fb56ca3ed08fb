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


class RunningCalls(Protocol):
    """The calls of handlers that run in this worker."""

    @property
    def waiting(self) -> Mapping[str, int]:
        """The number of tasks whose calls wait for others, by key."""

    def owners(self) -> Mapping[TaskName, WaitingCall | None]:
        """Return the calls by their tasks; ``None`` for a call that has never waited."""


async def check_wait(queue: Queue, task: TaskName, call: WaitingCall, calls: RunningCalls) -> None:
    """Raise `WouldBlock` if the wait of ``call`` for ``task`` cannot end.

    A wait cannot end if `max_inflight` of the task's queue is reached by calls of this worker whose waits cannot end
    either, or if the task is one of such a call.
    """
    key, task_id = task
    if not calls.waiting.get(key):
        return
    limits = {key: await _max_inflight(queue, key)}
    if not _may_be_stuck(task, calls, limits[key]):
        return
    for waited in {name for each in _loans(calls.owners()) for name, _ in each.waits} - {key}:
        limits[waited] = await _max_inflight(queue, waited)
    if not _is_stuck(task, call, calls.owners(), limits):
        return
    status = await queue.status(key, task_id)
    owners = calls.owners()
    # A task that another worker runs is not held up, and one that has ended needs no room.
    live = task in owners or (
        status is not None and status.state in (State.BLOCKED, State.WAITING, State.SCHEDULED)
    )
    if live and _is_stuck(task, call, owners, limits):
        raise WouldBlock(
            f"task {task_id} of {key} cannot end while this handler waits for it: {_advice(task, call, owners, limits)}"
        )


def _advice(
    task: TaskName,
    call: WaitingCall,
    owners: Mapping[TaskName, WaitingCall | None],
    limits: Mapping[str, int | None],
) -> str:
    """Return why ``call`` cannot wait for ``task``, and what to do."""
    found, names = {task}, [task]
    for name in names:
        owner = owners.get(name)
        if owner is call:
            return (
                "it is this handler's own task, or waits for it in turn, so the waits are a circle, which no limit "
                "changes. Let one of the handlers return without waiting, and publish what follows with its result"
            )
        more = set(owner.waits) - found if owner is not None else set()
        found |= more
        names += more
    full = sorted({key for key, _ in found - owners.keys() if limits.get(key) is not None})
    reached = ", ".join(f"of {key}: {limits[key]}" for key in full)
    return (
        f"handlers that wait for one another have reached max_inflight of a queue ({reached}). Raise the limit, or let "
        "the handler of the other task publish what follows"
    )


def _may_be_stuck(task: TaskName, calls: RunningCalls, limit: int | None) -> bool:
    if limit is not None and calls.waiting.get(task[0], 0) >= limit:
        return True
    owner = calls.owners().get(task)
    return owner is not None and bool(owner.waits)


def _loans(owners: Mapping[TaskName, WaitingCall | None]) -> set[WaitingCall]:
    return {each for each in owners.values() if each is not None and each.waits}


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
    owners: Mapping[TaskName, WaitingCall | None],
    limits: Mapping[str, int | None],
) -> bool:
    """Return whether ``call`` waits for ever for ``task``: assume that all waits do, and remove those that can end."""
    stuck = {call} | _loans(owners)

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
