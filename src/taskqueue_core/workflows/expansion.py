"""The tasks of the steps of a workflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from taskqueue_core.after import After, TaskRef
from taskqueue_core.tasks import Task
from taskqueue_core.workflows.steps import WorkflowStep, step_id
from taskqueue_core.workflows.stored import WORKFLOWS

__all__ = ["levels", "tasks_of"]


def tasks_of(workflow: str, steps: Sequence[WorkflowStep], source: str) -> list[Task]:
    """Return the tasks of steps, all of which wait for others.

    A step without parents in the workflow waits for the task ``source``, which holds the steps. So no step runs before
    that task is done, whatever happens while the steps are published. ``steps``: each after its parents.
    """
    known = {step.name: TaskRef(step.key, step_id(workflow, step.name)) for step in steps}
    gate = TaskRef(WORKFLOWS, source)
    return [step.task(workflow, _after(step, known, gate)) for step in steps]


def _after(step: WorkflowStep, known: dict[str, TaskRef], gate: TaskRef) -> After:
    parents = [known[each] if isinstance(each, str) else each for each in step.after]
    if len(step.others) < len(parents):
        return After(tasks=tuple(parents), when=step.when, on_dead=step.on_dead, inputs=step.inputs)
    inputs = tuple(place + 1 for place in step.inputs)
    return After(tasks=(gate, *parents), on_dead=step.on_dead, inputs=inputs)


class Placed(Protocol):
    """A step with its parents."""

    @property
    def name(self) -> str:
        """The name of the step."""

    @property
    def after(self) -> tuple[str | TaskRef, ...]:
        """The parents."""


S = TypeVar("S", bound=Placed)


def levels(steps: Sequence[S]) -> list[list[S]]:
    """Return steps by the length of the longest path to them; ``steps``: each after its parents."""
    depths: dict[str, int] = {}
    found: list[list[S]] = []
    for step in steps:
        names = [parent for parent in step.after if isinstance(parent, str)]
        depth = max((depths[name] + 1 for name in names), default=0)
        depths[step.name] = depth
        if depth == len(found):
            found.append([])
        found[depth].append(step)
    return found
