"""The workflows of a store, as data: `taskqueue_core.Queue.workflows`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_letters_of, dependencies_of
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_core.tasks import Confirmation, Task, TaskStatus, new_id
from taskqueue_core.workflows import (
    WORKFLOWS,
    Stored,
    WorkflowState,
    WorkflowStatus,
    WorkflowStep,
    cancel_task,
    check_workflow_id,
    checked_steps,
    manifest_tasks,
    part_ids,
    read_stored,
    step_id,
    steps_in,
)

__all__ = ["QueueWorkflows", "ServedWorkflows"]

_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.02, 0.5, 1.5
"""seconds between two looks at a workflow that is awaited"""


@runtime_checkable
class ServedWorkflows(Protocol):
    """The workflows of a server, which publishes their steps itself. Not part of the contract."""

    async def put_workflow(self, workflow: str, steps: Sequence[WorkflowStep]) -> Confirmation:
        """Store a workflow."""

    async def workflow_status(self, workflow: str) -> WorkflowStatus | None:
        """Return what became of a workflow; ``None`` if it is not known."""

    async def cancel_workflow(self, workflow: str) -> bool:
        """Cancel a workflow. Return False if it has ended or is not known."""


class QueueWorkflows:
    """The workflows of one backend. Servers and local workers publish their steps.

    Each method raises `CapabilityMissing` if the backend lacks ``after``, ``control`` or ``dead_letters``, and
    `BackendUnavailable`.

    >>> steps = [WorkflowStep.of("first", "mail"), WorkflowStep.of("second", "mail", after=("first",))]
    >>> confirmation = await queue.workflows.put(steps, id="cat-18")
    >>> (await queue.workflows.get("cat-18")).state.value
    'stored'
    """

    def __init__(
        self,
        backend: Backend,
        publish: Callable[[Iterable[Task]], Awaitable[tuple[Confirmation, ...]]],
        accepted: Callable[[Confirmation], Confirmation],
    ) -> None:
        """Use ``backend``. ``publish`` sends tasks to it; ``accepted`` raises the error of a refusal."""
        self._backend = backend
        self._publish = publish
        self._accepted = accepted

    def _served(self) -> ServedWorkflows | None:
        served = getattr(self._backend, "workflows", None)
        return served if isinstance(served, ServedWorkflows) else None

    def demand(self) -> None:
        """Raise `CapabilityMissing` if the backend cannot keep workflows."""
        dependencies_of(self._backend)
        control_of(self._backend)
        dead_letters_of(self._backend)

    async def put(self, steps: Sequence[WorkflowStep], *, id: str | None = None) -> Confirmation:  # noqa: A002 - as in `Task`
        """Store a workflow. Its steps are published soon afterwards, all of them, whatever happens to this process.

        ``id``: by default a random one. Publishing the same workflow again is harmless. Raises `InvalidWorkflow` before
        anything is stored, `IdConflict` if there is another workflow with this id, and `PublishUnconfirmed`.
        """
        workflow = new_id() if id is None else id
        check_workflow_id(workflow)
        for step in steps:
            if not isinstance(step, WorkflowStep):
                raise InvalidInput("steps", kind_of(step), "items that are a WorkflowStep")
        sorted_steps = checked_steps(steps)
        tasks = manifest_tasks(workflow, sorted_steps)
        if (served := self._served()) is not None:
            return self._accepted(await served.put_workflow(workflow, sorted_steps))
        self.demand()
        for part in await self._publish(tasks[:-1]):
            self._accepted(part)
        (confirmation,) = await self._publish(tasks[-1:])
        return self._accepted(confirmation)

    async def get(self, workflow: str) -> WorkflowStatus | None:
        """Return what became of a workflow; ``None`` if it is not known, or was forgotten."""
        check_workflow_id(workflow)
        if (served := self._served()) is not None:
            return await served.workflow_status(workflow)
        self.demand()
        control = control_of(self._backend)
        (task,) = await control.statuses(WORKFLOWS, workflow)
        if task is None:
            return None
        steps = await self.steps(workflow)
        by_key: dict[str, list[str]] = {}
        for step in steps:
            by_key.setdefault(step.key, []).append(step_id(workflow, step.name))
        answers = await gather_all(control.statuses(key, *ids) for key, ids in by_key.items())
        found: Mapping[tuple[str, str], TaskStatus | None] = {
            (key, task_id): status
            for (key, ids), statuses in zip(by_key.items(), answers, strict=True)
            for task_id, status in zip(ids, statuses, strict=True)
        }
        statuses = [found[step.key, step_id(workflow, step.name)] for step in steps]
        return WorkflowStatus.of(workflow, task, steps, statuses)

    async def steps(self, workflow: str) -> Sequence[WorkflowStep]:
        """Return the steps of a workflow, without their payloads; none if they are not all published."""
        control = control_of(self._backend)
        (text,) = await control.results(WORKFLOWS, workflow)
        dead = None
        if text is None:
            dead = await dead_letters_of(self._backend).get(WORKFLOWS, workflow)
            if dead is None:
                return ()
        stored: Stored = read_stored(dead.task.payload if text is None and dead else text or b"")
        if not stored.parts:
            return stored.steps
        parts = await control.results(WORKFLOWS, *part_ids(workflow, stored.parts))
        return () if None in parts else steps_in([part for part in parts if part is not None])

    async def cancel(self, workflow: str) -> bool:
        """Cancel a workflow: what is blocked or waiting ends as cancelled, and what runs is revoked.

        The order is stored, and carried out soon, whatever happens to this process; a second one changes nothing.
        Return False if the workflow has ended or is not known.
        """
        check_workflow_id(workflow)
        if (served := self._served()) is not None:
            return await served.cancel_workflow(workflow)
        status = await self.get(workflow)
        if status is None or status.state is WorkflowState.ENDED:
            return False
        (confirmation,) = await self._publish([cancel_task(workflow)])
        self._accepted(confirmation)
        return True

    async def wait(self, workflow: str) -> WorkflowStatus | None:
        """Return the status of a workflow once it has ended, or dead letters hold it; ``None`` if it is not known."""
        pause = _FIRST_PAUSE
        while True:
            status = await self.get(workflow)
            going = (WorkflowState.STORED, WorkflowState.RUNNING)
            if status is None or status.state not in going:
                # Read it once more: steps are read one after another, so those read first may have changed since.
                return await self.get(workflow)
            await asyncio.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)
