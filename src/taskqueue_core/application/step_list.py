"""Steps of a workflow that are not stored yet, and how they are published through their middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from taskqueue_core.after import ON_DEAD, WHEN, OnDead, TaskRef, When
from taskqueue_core.application.call import Call
from taskqueue_core.application.handles import Handle
from taskqueue_core.application.publishing import publish_together
from taskqueue_core.application.workflow_step import Step
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_choice, kind_of
from taskqueue_core.publish_options import ref_of
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, Published, Task
from taskqueue_core.workflows import InvalidWorkflow, WorkflowStep, check_own_name

R = TypeVar("R")
Parent = Step[Any] | Handle[Any] | TaskRef


class StepList:
    """Steps that wait for one another, in the order in which they were added."""

    def __init__(self) -> None:
        """Create a list without steps."""
        self._steps: dict[str, Step[Any]] = {}
        self._numbers: dict[str, int] = {}
        """the last number that was given to a step without a name, by the task's name"""

    @property
    def steps(self) -> tuple[Step[Any], ...]:
        """The steps, in the order in which they were added."""
        return tuple(self._steps.values())

    def _add(
        self,
        call: Call[R],
        after: Parent | Sequence[Parent],
        when: When,
        on_dead: OnDead,
        name: str | None,
    ) -> Step[R]:
        """Add a step. Raises `InvalidWorkflow`."""
        if not isinstance(call, Call):
            raise InvalidWorkflow(
                "call", kind_of(call), "a call, as in flow.add(resize.call('cat.png'))"
            )
        name = self._name(call) if name is None else name
        check_own_name(name)
        if name in self._steps:
            raise InvalidWorkflow(f"steps.{name}.name", "the name of two steps", "another name")
        options = call.options
        for option in ("id", "after", "debounce"):
            if options.get(option) is not None:
                raise InvalidWorkflow(
                    f"steps.{name}.{option}", "an option of the call", "no such option for a step"
                )
        if call.instants:
            raise InvalidWorkflow(f"steps.{name}.call", "an Instant", "a value")
        try:
            check_choice(f"steps.{name}.when", when, WHEN)
            check_choice(f"steps.{name}.on_dead", on_dead, ON_DEAD)
        except InvalidInput as error:
            raise InvalidWorkflow(error.field, error.got, error.allowed) from None
        given = after if isinstance(after, list | tuple) else [after]
        parents = dict.fromkeys([self._parent(name, each) for each in given])
        parents |= dict.fromkeys([self._parent(name, each.step) for each in call.outputs])
        step = Step(self, name, call, tuple(parents), when=when, on_dead=on_dead)
        self._steps[name] = step
        return step

    def _name(self, call: Call[Any]) -> str:
        base = call.function.name.rpartition(".")[2] or "step"
        number = self._numbers.get(base, 1)
        name = base if number == 1 else f"{base}-{number}"
        while name in self._steps:
            number += 1
            name = f"{base}-{number}"
        self._numbers[base] = number
        return name

    def _parent(self, name: str, parent: object) -> Step[Any] | TaskRef:
        if isinstance(parent, Step):
            if not parent.belongs_to(self):
                raise InvalidWorkflow(
                    f"steps.{name}.after", "a step of another workflow", "steps of this one"
                )
            return parent
        try:
            return ref_of("after", parent)
        except InvalidInput as error:
            allowed = "steps, and handles of published tasks"
            raise InvalidWorkflow(f"steps.{name}.after", error.got, allowed) from None

    async def _send(
        self,
        queue: Queue,
        put: Callable[[Sequence[WorkflowStep]], Awaitable[None]],
        task_id: Callable[[str], str],
    ) -> None:
        """Store all steps with ``put``, through the middleware of each. ``task_id`` returns the id of a step's task.

        Raises `InvalidWorkflow` if middleware does not send one of them.
        """
        steps = self.steps
        published = False

        async def send(tasks: Sequence[tuple[int, Task]]) -> Sequence[Confirmation]:
            nonlocal published
            sent = {place: steps[place].data(task) for place, task in tasks}
            if missing := set(range(len(steps))) - sent.keys():
                raise _not_sent(steps[min(missing)].name)
            await put([sent[place] for place in range(len(steps))])
            published = True
            return [
                Confirmation(
                    key=task.key, task_id=task_id(steps[place].name), status=Published.ACCEPTED
                )
                for place, task in tasks
            ]

        await publish_together(
            [step.call.using(id=task_id(step.name)) for step in steps],
            lambda call: call.function.task(queue, call.payload),
            send,
        )
        if not published:
            raise _not_sent(steps[0].name)


def _not_sent(name: str) -> InvalidWorkflow:
    got, allowed = "a call that middleware did not send", "calls that are sent, all at once"
    return InvalidWorkflow(f"steps.{name}", got, allowed)
