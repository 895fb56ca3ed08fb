"""The steps of a workflow of declared tasks."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

import msgspec

from taskqueue_core.after import OnDead, TaskRef, When
from taskqueue_core.application.call import Call
from taskqueue_core.application.outputs import Output
from taskqueue_core.tasks import Task
from taskqueue_core.workflows import InvalidWorkflow, WorkflowStep

R_co = TypeVar("R_co", covariant=True)


class Step(Generic[R_co]):
    """A step of a workflow: a call, and the steps that it waits for. `Workflow.add` creates it.

    >>> flow = Workflow()
    >>> step = flow.add(resize.call("cat.png"))
    >>> step.name
    'resize'
    """

    __slots__ = ("_workflow", "after", "call", "name", "on_dead", "when")

    def __init__(
        self,
        workflow: object,
        name: str,
        call: Call[R_co],
        after: tuple[Step[Any] | TaskRef, ...],
        *,
        when: When,
        on_dead: OnDead,
    ) -> None:
        """Store the fields."""
        self._workflow = workflow
        self.name = name
        """name of the step, unique in its workflow"""
        self.call = call
        self.after = after
        """the parents"""
        self.when = when
        self.on_dead = on_dead

    def __repr__(self) -> str:
        return f"<step {self.name}>"

    @property
    def output(self) -> R_co:
        """An argument for another step, which gets the result of this one: the whole argument, or in a list or a dict.

        For type checkers it is the result. The other step is called with the result itself.

        >>> flow = Workflow()
        >>> small = flow.add(resize.call("cat.png", 64))
        >>> described = flow.add(describe.call(small.output))
        """
        return cast("R_co", Output(self))

    def belongs_to(self, workflow: object) -> bool:
        """Return whether this is a step of a workflow."""
        return self._workflow is workflow

    def data(self, task: Task) -> WorkflowStep:
        """Return the step as data. ``task``: what its call publishes. Raises `InvalidWorkflow`."""
        for field in ("unique", "after"):
            if getattr(task, field) is not None:
                hint = (
                    "none: write call.using(unique=None)" if field == "unique" else "add(after=...)"
                )
                raise InvalidWorkflow(f"steps.{self.name}.{field}", "an option of the call", hint)
        inputs = [self.after.index(cast("Step[Any]", each.step)) for each in self.call.outputs]
        return WorkflowStep(
            name=self.name,
            key=task.key,
            payload=msgspec.Raw(task.payload),
            headers=task.headers,
            priority=task.priority,
            tenant=task.tenant,
            ordering_key=task.ordering_key,
            deadline=task.deadline,
            not_before=task.not_before,
            max_attempts=task.max_attempts,
            tags=task.tags,
            content_digest=task.content_digest,
            after=tuple(each.name if isinstance(each, Step) else each for each in self.after),
            when=self.when,
            on_dead=self.on_dead,
            inputs=tuple(inputs),
        )
