"""Workflows of declared tasks: steps that wait for one another, and are published together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from taskqueue_core.after import OnDead, TaskRef, When
from taskqueue_core.application.call import Call
from taskqueue_core.application.handles import Handle
from taskqueue_core.application.publishing import publish_together
from taskqueue_core.application.workflow_handle import SyncWorkflowHandle, WorkflowHandle
from taskqueue_core.application.workflow_step import Step
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_core.publish_options import ref_of
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, Published, Task, new_id
from taskqueue_core.workflows import (
    InvalidWorkflow,
    check_step_name,
    check_workflow_id,
    step_id,
)

R = TypeVar("R")
Parent = Step[Any] | Handle[Any] | TaskRef


class Workflow:
    """Steps that wait for one another. They are published together: all of them, or none.

    >>> flow = Workflow()
    >>> small = [flow.add(resize.call("cat.png", width)) for width in (64, 128)]
    >>> flow.add(describe.call(small[0].output), after=small)
    <step describe>
    >>> flow_handle = await flow.publish(id="cat-19")
    """

    def __init__(self) -> None:
        """Create a workflow without steps."""
        self._steps: dict[str, Step[Any]] = {}

    @property
    def steps(self) -> tuple[Step[Any], ...]:
        """The steps, in the order in which they were added."""
        return tuple(self._steps.values())

    def add(
        self,
        call: Call[R],
        *,
        after: Parent | Sequence[Parent] = (),
        when: When = "done",
        on_dead: OnDead = "hold",
        name: str | None = None,
    ) -> Step[R]:
        """Add a step, which waits for the steps in ``after`` and those whose outputs it gets. ``when`` is how they end.

        ``done``: all of them are done; otherwise the step is cancelled, but a dead letter holds it until it is redriven
        or discarded, unless ``on_dead`` is ``cancel``. ``failed``: one of them is not done, such as a dead letter; if
        all are done, the step is cancelled. ``ended``: all have ended, in whatever way; an output is then ``None`` if
        there is no result.

        ``after`` may also contain handles of published tasks; then ``when`` is ``done``. ``name`` is the last part of
        the task's name by default, with a number if that is taken. Raises `InvalidWorkflow`.

        >>> flow = Workflow()
        >>> first = flow.add(resize.call("cat.png"))
        >>> cleaned = flow.add(describe.call({"width": 0}), after=first, when="ended", name="clean")
        """
        if not isinstance(call, Call):
            raise InvalidWorkflow(
                "call", kind_of(call), "a call, as in flow.add(resize.call('cat.png'))"
            )
        name = self._name(call) if name is None else name
        check_step_name(name)
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
        given = after if isinstance(after, list | tuple) else [after]
        parents = dict.fromkeys([self._parent(name, each) for each in given])
        parents |= dict.fromkeys([self._parent(name, each.step) for each in call.outputs])
        step = Step(self, name, call, tuple(parents), when=when, on_dead=on_dead)
        self._steps[name] = step
        return step

    def _name(self, call: Call[Any]) -> str:
        base = call.function.name.rpartition(".")[2] or "step"
        number, name = 1, base
        while name in self._steps:
            number += 1
            name = f"{base}-{number}"
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

    async def publish(self, *, id: str | None = None) -> WorkflowHandle:  # noqa: A002 - as in `Task`
        """Store the workflow, whose steps are published soon afterwards, and return its handle.

        ``id``: by default a random one; the id of a step's task is this one, a dot and the step's name. Publishing the
        same workflow again is harmless. The connection is that of the first call. Raises `InvalidWorkflow` before
        anything is sent, `NotConnected`, `IdConflict`, `CapabilityMissing`, and what middleware raises.

        >>> flow_handle = await chain(resize.call("cat.png"), resize.call("dog.png")).publish()
        """
        if not self._steps:
            raise InvalidWorkflow("steps", "no step", "1 to 1000 steps")
        return await self._publish(self.steps[0].call.function.connection(), id)

    def publish_sync(self, *, id: str | None = None) -> SyncWorkflowHandle:  # noqa: A002 - as in `Task`
        """Store the workflow from code without an event loop, as `publish` does.

        >>> flow_handle = chain(resize.call("cat.png"), resize.call("dog.png")).publish_sync()
        """
        if not self._steps:
            raise InvalidWorkflow("steps", "no step", "1 to 1000 steps")
        queue = self.steps[0].call.function.sync_connection()
        return SyncWorkflowHandle(queue, queue.run(self._publish(queue.queue, id)))

    async def _publish(self, queue: Queue, workflow: str | None) -> WorkflowHandle:
        workflow = new_id() if workflow is None else workflow
        check_workflow_id(workflow)
        steps = self.steps
        names = [step.name for step in steps]
        published = False

        async def send(tasks: Sequence[tuple[int, Task]]) -> Sequence[Confirmation]:
            nonlocal published
            sent = {place: steps[place].data(task) for place, task in tasks}
            if missing := set(range(len(steps))) - sent.keys():
                raise _not_sent(names[min(missing)])
            await queue.workflows.put([sent[place] for place in range(len(steps))], id=workflow)
            published = True
            return [
                Confirmation(
                    key=task.key, task_id=step_id(workflow, names[place]), status=Published.ACCEPTED
                )
                for place, task in tasks
            ]

        await publish_together(
            [step.call.using(id=step_id(workflow, step.name)) for step in steps],
            lambda call: call.function.task(queue, call.payload),
            send,
        )
        if not published:
            raise _not_sent(names[0])
        return self.handle(workflow, queue)

    def handle(self, id: str, on: Queue | None = None) -> WorkflowHandle:  # noqa: A002 - as in `Task`
        """Return the handle of a workflow with these steps that was published elsewhere. Raises `NotConnected`."""
        queue = on or self.steps[0].call.function.connection()
        return WorkflowHandle(queue, id)


def _not_sent(name: str) -> InvalidWorkflow:
    got, allowed = "a call that middleware did not send", "calls that are sent, all at once"
    return InvalidWorkflow(f"steps.{name}", got, allowed)


def chain(*calls: Call[Any]) -> Workflow:
    """Return a workflow in which each call waits until the one before it is done. Raises `InvalidWorkflow`.

    >>> flow_handle = await chain(resize.call("cat.png"), resize.call("dog.png")).publish()
    """
    flow = Workflow()
    before: tuple[Step[Any], ...] = ()
    for call in calls:
        before = (flow.add(call, after=before),)
    return flow


def group(
    *calls: Call[Any],
    then: Call[Any] | None = None,
    failed: Call[Any] | None = None,
    ended: Call[Any] | None = None,
) -> Workflow:
    """Return a workflow in which the calls run side by side, and then others. Raises `InvalidWorkflow`.

    ``then`` runs if all calls are done, ``failed`` if one of them is not, and ``ended`` when all have ended.

    >>> calls = [resize.call("cat.png", width) for width in (64, 128)]
    >>> flow_handle = await group(*calls, then=describe.call({"width": 0})).publish()
    """
    flow = Workflow()
    members = [flow.add(call) for call in calls]
    after: Mapping[When, tuple[str, Call[Any] | None]] = {
        "done": ("then", then),
        "failed": ("failed", failed),
        "ended": ("ended", ended),
    }
    for when, (name, call) in after.items():
        if call is not None:
            flow.add(call, after=members, when=when, name=name)
    return flow
