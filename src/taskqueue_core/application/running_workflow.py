"""The workflow that a running task is part of, to which its handler may add steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from taskqueue_core.after import OnDead, TaskRef, When
from taskqueue_core.application.call import Call
from taskqueue_core.application.step_list import Parent, StepList
from taskqueue_core.application.workflow_step import Step
from taskqueue_core.queue import Queue
from taskqueue_core.workflows import (
    STEP_HEADER,
    WORKFLOW_HEADER,
    InvalidWorkflow,
    WorkflowStep,
    added_name,
    step_id,
)

R = TypeVar("R")


class RunningWorkflow(StepList):
    """The workflow that a running task is a step of: `Context.workflow`. Its handler adds steps.

    >>> @tasks.task
    ... async def split(context: Context, image: str) -> None:
    ...     small = [context.workflow.add(resize.call(image, width)) for width in (64, 128)]
    ...     context.workflow.add(describe.call(small[0].output), after=small)
    >>> flow_handle = await chain(split.call("cat.png")).publish(id="cat-21")
    """

    def __init__(self, id: str, step: TaskRef) -> None:  # noqa: A002 - as in `Task`
        """Create a workflow without added steps. ``step``: the running task."""
        super().__init__()
        self.id = id
        """id of the workflow"""
        self._step = step
        self._own = step.task_id.removeprefix(f"{id}.")
        self._ended = False

    @staticmethod
    def of(step: TaskRef, headers: dict[str, str]) -> RunningWorkflow:
        """Return the workflow that a task with these headers is a step of. Raises `InvalidWorkflow`."""
        workflow, name = headers.get(WORKFLOW_HEADER), headers.get(STEP_HEADER)
        if workflow is None or name is None or step.task_id != step_id(workflow, name):
            raise InvalidWorkflow(
                "context.workflow",
                "a task that is no step of a workflow",
                "a step; otherwise publish a Workflow, or single tasks",
            )
        return RunningWorkflow(workflow, step)

    def add(
        self,
        call: Call[R],
        *,
        after: Parent | Sequence[Parent] = (),
        when: When = "done",
        on_dead: OnDead = "hold",
        name: str | None = None,
    ) -> Step[R]:
        """Add a step, as `Workflow.add` does. All steps that a handler adds are stored when it has succeeded.

        They run once the task of the handler is done; a handler that fails adds nothing. ``after``: steps that this
        handler has added, and handles of other tasks, also of other steps. The whole name is that of the running step,
        a colon and ``name``. A handler that runs again must add the same steps. Raises `InvalidWorkflow`, also after
        the end of the handler.

        >>> @tasks.task
        ... async def pages(context: Context, number: int) -> None:
        ...     for page in range(number):
        ...         context.workflow.add(charge.call(page), name=f"page-{page}")
        """
        if self._ended:
            raise InvalidWorkflow(
                "context.workflow", "a handler that has ended", "add before the handler returns"
            )
        step = self._add(call, after, when, on_dead, name)
        try:
            added_name(self._own, step.name)
        except InvalidWorkflow:
            del self._steps[step.name]
            raise
        return step

    def end(self) -> None:
        """Accept no more steps. Only the worker calls this."""
        self._ended = True

    async def store(self, queue: Queue) -> None:
        """Store the steps, through the middleware of each. Only the worker calls this.

        Raises as `QueueWorkflows.add` does, and what middleware raises.
        """

        async def put(steps: Sequence[WorkflowStep]) -> None:
            await queue.workflows.add(steps, by=self._step)

        def task_id(name: str) -> str:
            return step_id(self.id, added_name(self._own, name))

        await self._send(queue, put, task_id)
