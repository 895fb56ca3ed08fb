"""What became of a workflow and its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from taskqueue_core.after import TaskRef, When
from taskqueue_core.task_state import State
from taskqueue_core.tasks import TaskStatus
from taskqueue_core.workflows.steps import WorkflowStep, step_id

__all__ = ["StepStatus", "WorkflowPage", "WorkflowState", "WorkflowStatus", "WorkflowSummary"]
_HELD_SHOWN = 20
"""maximum number of dead letters in a `WorkflowSummary`"""


class WorkflowState(StrEnum):
    """The state of a workflow.

    >>> (await flow_handle.wait(timeout=30)).state is WorkflowState.ENDED
    True
    """

    STORED = "stored"
    """its steps are not all published"""
    RUNNING = "running"
    HELD = "held"
    """its steps cannot go on before dead letters are redriven or discarded"""
    ENDED = "ended"
    """all steps have ended; a dead letter that holds no step counts as ended"""


class StepStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one step of a workflow.

    >>> status = await flow_handle.status()
    >>> status.steps[0].name
    'resize'
    """

    name: str
    key: str
    """name of the queue"""
    task_id: str
    """id of the task"""
    after: tuple[str | TaskRef, ...] = ()
    """the parents: names of steps, and tasks outside of the workflow"""
    when: When = "done"
    status: TaskStatus | None = None
    """the status of the task; ``None`` if it is not published yet, or its record was deleted after its end"""

    @property
    def state(self) -> State | None:
        """The state of the task; ``None`` if it is not known."""
        return None if self.status is None else self.status.state


class WorkflowStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a workflow.

    >>> status = await flow_handle.status()
    >>> [step.name for step in status.steps if step.state is State.DEAD]
    []
    """

    id: str
    state: WorkflowState
    steps: tuple[StepStatus, ...] = ()
    """the steps, each after its parents; empty if they are not all published"""
    problem: str | None = None
    """why the steps, or steps that one of them has added, are not all published, if an attempt has failed"""

    @staticmethod
    def of(
        workflow: str,
        task: TaskStatus,
        steps: Sequence[WorkflowStep],
        statuses: Sequence[TaskStatus | None],
        additions: Sequence[TaskStatus] = (),
    ) -> WorkflowStatus:
        """Return the status. ``task``: that of the task of the workflow; ``statuses``: those of the steps.

        ``additions``: those of the tasks that hold added steps.
        """
        found = tuple(
            StepStatus(
                name=step.name,
                key=step.key,
                task_id=step_id(workflow, step.name),
                after=step.after,
                when=step.when,
                status=status,
            )
            for step, status in zip(steps, statuses, strict=True)
        )
        problems = [
            each.error
            for each in (task, *additions)
            if each.error and each.state is not State.CANCELLED
        ]
        return WorkflowStatus(
            id=workflow,
            state=_state(task, found, additions),
            steps=found,
            problem=problems[0] if problems else None,
        )


class WorkflowSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A workflow as a list shows it.

    >>> page = await queue.workflows.list()
    >>> [each.id for each in page.workflows if each.state is WorkflowState.HELD]
    []
    """

    id: str
    state: WorkflowState
    steps: int = 0
    """number of the steps; 0 if they are not all published"""
    counts: dict[State, int] = {}
    """number of the steps in each state; those whose record was deleted after their end are in none"""
    updated_at: float | None = None
    """time of the last change of a step; ``None`` if it is not known"""
    held_by: tuple[TaskRef, ...] = ()
    """the first dead letters that hold steps"""
    problem: str | None = None
    """as `WorkflowStatus.problem`, or why the steps cannot be read; the state is ``held`` then"""

    @staticmethod
    def of(found: WorkflowStatus) -> WorkflowSummary:
        """Return the summary of a status."""
        statuses = [step.status for step in found.steps if step.status is not None]
        dead = dict.fromkeys(ref for status in statuses for ref in status.held_by)
        return WorkflowSummary(
            id=found.id,
            state=found.state,
            steps=len(found.steps),
            counts=dict(Counter(status.state for status in statuses)),
            updated_at=max((status.updated_at for status in statuses), default=None),
            held_by=tuple(dead)[:_HELD_SHOWN],
            problem=found.problem,
        )


class WorkflowPage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One page of workflows.

    >>> page = await queue.workflows.list(limit=20)
    >>> page.workflows, page.next
    ((), None)
    """

    workflows: tuple[WorkflowSummary, ...]
    next: str | None = None
    """where the next page begins, to pass as ``after``; ``None`` after the last page"""


def _state(
    task: TaskStatus, steps: Sequence[StepStatus], additions: Sequence[TaskStatus]
) -> WorkflowState:
    if task.state.live:
        return WorkflowState.STORED
    if task.state is State.DEAD:
        return WorkflowState.HELD
    if any(each.state.live and not each.held_by for each in additions):
        return WorkflowState.RUNNING
    live = [step.status for step in steps if step.status is not None and step.status.state.live]
    if not live:
        is_held = any(each.state.live or each.state is State.DEAD for each in additions)
        return WorkflowState.HELD if is_held else WorkflowState.ENDED
    held = {step.name for step in steps if step.status is not None and step.status.held_by}
    for step in steps:  # each comes after its parents
        if step.state is State.BLOCKED and not held.isdisjoint(step.after):
            held.add(step.name)
    going = [step for step in steps if step.state is not None and step.state.live]
    return WorkflowState.HELD if all(step.name in held for step in going) else WorkflowState.RUNNING
