"""The steps of a workflow in a store: those with which it was published, and those that its steps have added."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import Control, DeadLetters
from taskqueue_core.concurrency import gather_all
from taskqueue_core.limits import LIMITS
from taskqueue_core.task_state import State
from taskqueue_core.tasks import TaskStatus
from taskqueue_core.workflows import (
    WORKFLOWS,
    Stored,
    WorkflowStep,
    addition_id,
    part_ids,
    read_stored,
    sorted_steps,
    step_id,
    steps_in,
)

__all__ = ["Graph", "read_graph", "steps_of"]


class Graph(msgspec.Struct, frozen=True):
    """The steps of a workflow, without payloads, and what became of the tasks that hold them."""

    main: TaskStatus
    """the status of the task of the workflow"""
    steps: tuple[WorkflowStep, ...]
    """the steps that are published, each after its parents; of an added step, the one that added it is a parent"""
    statuses: tuple[TaskStatus | None, ...]
    """the statuses of the steps, in the same order"""
    additions: tuple[TaskStatus, ...] = ()
    """the statuses of the tasks that hold added steps"""


async def steps_of(
    control: Control, dead_letters: DeadLetters, task_id: str
) -> tuple[WorkflowStep, ...]:
    """Return the steps that a task of the internal queue holds; none if they are not published.

    Those of a dead letter may be published in part.
    """
    (text,) = await control.results(WORKFLOWS, task_id)
    if text is None:
        dead = await dead_letters.get(WORKFLOWS, task_id)
        if dead is None:
            return ()
        text = dead.task.payload
    return await stored_steps(control, task_id, read_stored(text))


async def stored_steps(control: Control, task_id: str, stored: Stored) -> tuple[WorkflowStep, ...]:
    """Return the steps in what is stored as the task ``task_id``; none if a part of them is not stored any more."""
    if not stored.parts:
        return stored.steps
    parts = await control.results(WORKFLOWS, *part_ids(task_id, stored.parts))
    return () if None in parts else steps_in([part for part in parts if part is not None])


async def read_graph(control: Control, dead_letters: DeadLetters, workflow: str) -> Graph | None:
    """Return the steps of a workflow, and what became of them; ``None`` if it is not known."""
    (main,) = await control.statuses(WORKFLOWS, workflow)
    if main is None:
        return None
    found: dict[str, WorkflowStep] = {}
    statuses: dict[str, TaskStatus | None] = {}
    additions: list[TaskStatus] = []
    steps = await steps_of(control, dead_letters, workflow)
    while steps:
        found |= {step.name: step for step in steps}
        # First the steps, then what they have added: they add it before they end.
        seen = await _statuses(control, [TaskRef(s.key, step_id(workflow, s.name)) for s in steps])
        statuses |= dict(zip([step.name for step in steps], seen, strict=True))
        adding = {
            addition_id(ref): step.name
            for step, status in zip(steps, seen, strict=True)
            if status is None or status.state is not State.BLOCKED
            for ref in [TaskRef(step.key, step_id(workflow, step.name))]
        }
        held = await _statuses(control, [TaskRef(WORKFLOWS, each) for each in adding])
        known = [status for status in held if status is not None]
        additions += known
        groups = await gather_all(
            _added(control, dead_letters, status.task_id, adding[status.task_id])
            for status in known
            if status.state in (State.DONE, State.DEAD)
        )
        steps = tuple(step for group in groups for step in group)
    names = {TaskRef(s.key, step_id(workflow, s.name)): s.name for s in found.values()}
    ordered = sorted_steps({name: _named(step, names) for name, step in found.items()})
    return Graph(main, ordered, tuple([statuses[step.name] for step in ordered]), tuple(additions))


async def _added(
    control: Control, dead_letters: DeadLetters, task_id: str, by: str
) -> list[WorkflowStep]:
    """Return the steps in an addition, with the step that added them as the parent of those without others."""
    return [
        step if len(step.others) < len(step.after) else replace(step, after=(by, *step.after))
        for step in await steps_of(control, dead_letters, task_id)
    ]


def _named(step: WorkflowStep, names: dict[TaskRef, str]) -> WorkflowStep:
    """Return a step whose parents in the workflow are named."""
    if not step.others:
        return step
    parents = [names.get(each, each) if isinstance(each, TaskRef) else each for each in step.after]
    return replace(step, after=tuple(dict.fromkeys(parents)))


async def _statuses(control: Control, refs: Sequence[TaskRef]) -> list[TaskStatus | None]:
    """Return the statuses of tasks, in order."""
    by_key: dict[str, list[str]] = {}
    for ref in refs:
        by_key.setdefault(ref.key, []).append(ref.task_id)
    calls = [
        (key, ids[start : start + LIMITS.batch])
        for key, ids in by_key.items()
        for start in range(0, len(ids), LIMITS.batch)
    ]
    answers = await gather_all(control.statuses(key, *ids) for key, ids in calls)
    found = {
        (key, task_id): status
        for (key, ids), statuses in zip(calls, answers, strict=True)
        for task_id, status in zip(ids, statuses, strict=True)
    }
    return [found[ref.key, ref.task_id] for ref in refs]
