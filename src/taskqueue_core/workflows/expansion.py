"""The tasks of the steps of a workflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from msgspec import structs

from taskqueue_core.after import After, TaskRef
from taskqueue_core.tasks import Task
from taskqueue_core.workflows.steps import WorkflowStep, step_id
from taskqueue_core.workflows.stored import RELAY, WORKFLOWS, relay_id

__all__ = ["levels", "tasks_of"]


def tasks_of(workflow: str, steps: Sequence[WorkflowStep], source: str) -> list[Task]:
    """Return the tasks of steps, all of which wait for others, in an order in which each comes after its parents.

    A step without parents in the workflow waits for the task ``source``, which holds the steps. So no step runs before
    that task is done, whatever happens while the steps are published. ``steps``: each after its parents.

    That task must be done, so a step whose parents may end otherwise cannot wait for it and for them: a relay, a task
    of the internal queue, waits for the parents, and the step for the relay and that task.
    """
    known = {step.name: TaskRef(step.key, step_id(workflow, step.name)) for step in steps}
    gate = TaskRef(WORKFLOWS, source)
    tasks = []
    for step in steps:
        parents = tuple([known[each] if isinstance(each, str) else each for each in step.after])
        after = After(
            tasks=parents or (gate,), when=step.when, on_dead=step.on_dead, inputs=step.inputs
        )
        if step.needs_relay:
            relay = TaskRef(WORKFLOWS, relay_id(workflow, step.name))
            tasks.append(Task(key=relay.key, id=relay.task_id, payload=RELAY, after=after))
            after = After(tasks=(gate, relay))
        elif parents and len(step.others) == len(parents):
            inputs = tuple(place + 1 for place in step.inputs)
            after = structs.replace(after, tasks=(gate, *parents), inputs=inputs)
        tasks.append(step.task(workflow, after))
    return tasks


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
