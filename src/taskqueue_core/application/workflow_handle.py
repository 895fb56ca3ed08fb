"""Handles of published workflows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from taskqueue_core.application.errors import UnknownTask
from taskqueue_core.application.handles import Handle
from taskqueue_core.application.workflow_step import Step
from taskqueue_core.queue import Queue
from taskqueue_core.sync import SyncQueue
from taskqueue_core.workflows import (
    StepStatus,
    WorkflowState,
    WorkflowStatus,
    check_workflow_id,
    step_id,
)

S = TypeVar("S")
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.02, 0.5, 1.5
"""seconds between two looks at a workflow"""


class WorkflowHandle:
    """A published workflow, from the publisher's side. `Workflow.publish` creates it.

    >>> status = await flow_handle.wait(timeout=30)
    >>> status.state.value
    'ended'
    """

    __slots__ = ("_queue", "id")

    def __init__(self, queue: Queue, id: str) -> None:  # noqa: A002 - as in `Task`
        """Create the handle of the workflow with this id. Raises `InvalidInput`."""
        check_workflow_id(id)
        self.id = id
        """id of the workflow"""
        self._queue = queue

    def __repr__(self) -> str:
        return f"<handle of workflow {self.id}>"

    async def status(self) -> WorkflowStatus | None:
        """Return what became of the workflow and its steps; ``None`` if it is not known, or was forgotten.

        >>> status = await flow_handle.status()
        """
        return await self._queue.workflows.get(self.id)

    async def cancel(self) -> bool:
        """Cancel the workflow: what is blocked or waiting ends as cancelled, and what runs is stopped.

        The order is stored, and carried out soon. Steps that were to run at an end are cancelled, too. Return False if
        the workflow has ended or is not known.

        >>> await flow_handle.cancel()
        False
        """
        return await self._queue.workflows.cancel(self.id)

    async def wait(self, timeout: float | None = None) -> WorkflowStatus:
        """Return the status once all steps have ended, or those that are left are held by dead letters.

        ``timeout`` is in seconds. Raises ``TimeoutError``, and `UnknownTask` if the workflow is not known.

        >>> status = await flow_handle.wait(timeout=30)
        """
        async with asyncio.timeout(timeout):
            status = await self._queue.workflows.wait(self.id)
        if status is None:
            raise UnknownTask(
                f"workflow {self.id} is unknown: it was never published, or was forgotten"
            )
        return status

    def step(self, step: Step[S]) -> Handle[S]:
        """Return the handle of the task of a step. Until the step is published, its task is not known.

        >>> flow = Workflow()
        >>> step = flow.add(resize.call("cat.png"))
        >>> (await flow.publish(id="cat-20")).step(step).id
        'cat-20.resize'
        """
        function = step.call.function
        task_id = step_id(self.id, step.name)
        return Handle(
            function.queue,
            task_id,
            self._queue,
            function.read_result,
            encoding=function.encoding,
        )

    async def result(self, step: Step[S], timeout: float | None = None) -> S:
        """Wait until a step has ended, and return its result, as `Handle.result` does, with its errors.

        >>> flow = Workflow()
        >>> step = flow.add(resize.call("cat.png"))
        >>> flow_handle = await flow.publish()
        >>> await flow_handle.result(step, timeout=30)
        {'width': 320}
        """
        async with asyncio.timeout(timeout) as limit:
            pause = _FIRST_PAUSE
            while (status := await self.status()) and status.state is WorkflowState.STORED:
                await asyncio.sleep(pause)
                pause = min(pause * _GROWTH, _LONGEST_PAUSE)
        end = limit.when()
        left = None if end is None else max(0.0, end - asyncio.get_running_loop().time())
        return await self.step(step).result(left)

    async def events(self) -> AsyncIterator[StepStatus]:
        """Yield each step when its state has changed, until the workflow has ended. The store is asked repeatedly.

        >>> async for step in flow_handle.events():
        ...     print(step.name, step.state)
        resize done
        """
        known: dict[str, object] = {}
        pause = _FIRST_PAUSE
        while (status := await self.status()) is not None:
            for step in status.steps:
                seen = step.state, None if step.status is None else step.status.attempt
                if step.status is not None and known.get(step.name) != seen:
                    known[step.name], pause = seen, _FIRST_PAUSE
                    yield step
            if status.state is WorkflowState.ENDED:
                return
            await asyncio.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)


class SyncWorkflowHandle:
    """A `WorkflowHandle` whose methods block until they have a result.

    >>> flow_handle = chain(resize.call("cat.png")).publish_sync()
    >>> flow_handle.wait(timeout=30).state.value
    'ended'
    """

    def __init__(self, queue: SyncQueue, handle: WorkflowHandle) -> None:
        """Wrap a handle. ``queue``: the connection whose event loop runs the calls."""
        self.id = handle.id
        self._queue = queue
        self._handle = handle

    def __repr__(self) -> str:
        return repr(self._handle)

    def status(self) -> WorkflowStatus | None:
        """Return what became of the workflow, as `WorkflowHandle.status` does."""
        return self._queue.run(self._handle.status())

    def cancel(self) -> bool:
        """Cancel the workflow, as `WorkflowHandle.cancel` does."""
        return self._queue.run(self._handle.cancel())

    def wait(self, timeout: float | None = None) -> WorkflowStatus:
        """Return the status at the end, as `WorkflowHandle.wait` does."""
        return self._queue.run(self._handle.wait(timeout))

    def result(self, step: Step[S], timeout: float | None = None) -> S:
        """Wait for the result of a step, as `WorkflowHandle.result` does."""
        return self._queue.run(self._handle.result(step, timeout))
