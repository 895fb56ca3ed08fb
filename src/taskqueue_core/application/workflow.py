"""Workflows of declared tasks: steps that wait for one another, and are published together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from taskqueue_core.after import OnDead, When
from taskqueue_core.application.call import Call, DeclaredTask
from taskqueue_core.application.errors import NotConnected
from taskqueue_core.application.step_list import Parent, StepList
from taskqueue_core.application.workflow_handle import SyncWorkflowHandle, WorkflowHandle
from taskqueue_core.application.workflow_step import Step
from taskqueue_core.queue import Queue
from taskqueue_core.sync import SyncQueue
from taskqueue_core.tasks import new_id
from taskqueue_core.workflows import InvalidWorkflow, WorkflowStep, check_workflow_id, step_id

R = TypeVar("R")
C = TypeVar("C", Queue, SyncQueue)


class Workflow(StepList):
    """Steps that wait for one another. They are published together: all of them, or none.

    >>> flow = Workflow()
    >>> small = [flow.add(resize.call("cat.png", width)) for width in (64, 128)]
    >>> flow.add(describe.call(small[0].output), after=small)
    <step describe>
    >>> flow_handle = await flow.publish(id="cat-19")
    """

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
        return self._add(call, after, when, on_dead, name)

    async def publish(self, *, id: str | None = None) -> WorkflowHandle:  # noqa: A002 - as in `Task`
        """Store the workflow, whose steps are published soon afterwards, and return its handle.

        ``id``: by default a random one; the id of a step's task is this one, a dot and the step's name. Publishing the
        same workflow again is harmless. The connection is that of the first call that has one. Raises `InvalidWorkflow`
        before anything is sent, `NotConnected`, `IdConflict`, `CapabilityMissing`, and what middleware raises.

        >>> flow_handle = await chain(resize.call("cat.png"), resize.call("dog.png")).publish()
        """
        return await self._publish(self._connection(lambda one: one.connection()), id)

    def publish_sync(self, *, id: str | None = None) -> SyncWorkflowHandle:  # noqa: A002 - as in `Task`
        """Store the workflow from code without an event loop, as `publish` does.

        >>> flow_handle = chain(resize.call("cat.png"), resize.call("dog.png")).publish_sync()
        """
        queue = self._connection(lambda one: one.sync_connection())
        return SyncWorkflowHandle(queue, queue.run(self._publish(queue.queue, id)))

    async def _publish(self, queue: Queue, workflow: str | None) -> WorkflowHandle:
        workflow = new_id() if workflow is None else workflow
        check_workflow_id(workflow)

        async def put(steps: Sequence[WorkflowStep]) -> None:
            await queue.workflows.put(steps, id=workflow)

        await self._send(queue, put, lambda name: step_id(workflow, name))
        return self.handle(workflow, queue)

    def handle(self, id: str, on: Queue | None = None) -> WorkflowHandle:  # noqa: A002 - as in `Task`
        """Return the handle of a workflow with these steps that was published elsewhere. Raises `NotConnected`."""
        return WorkflowHandle(on or self._connection(lambda one: one.connection()), id)

    def _connection(self, find: Callable[[DeclaredTask[Any]], C]) -> C:
        """Return the connection of the first call that has one; declarations for other languages may have none."""
        if not self._steps:
            raise InvalidWorkflow("steps", "no step", "1 to 1000 steps")
        for step in self.steps:
            with suppress(NotConnected):
                return find(step.call.function)
        return find(self.steps[0].call.function)  # raises NotConnected


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
