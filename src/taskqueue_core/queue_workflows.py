"""The workflows of a store, as data: `taskqueue_core.Queue.workflows`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from taskqueue_core.after import TaskRef
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_letters_of, dependencies_of, listing_of
from taskqueue_core.concurrency import gather_all
from taskqueue_core.consumer.carrier import register
from taskqueue_core.errors import IdConflict, InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_core.tasks import Confirmation, Task, new_id
from taskqueue_core.workflow_graph import read_graph
from taskqueue_core.workflow_list import check_page, read_page
from taskqueue_core.workflows import (
    WORKFLOWS,
    InvalidWorkflow,
    UnknownWorkflow,
    WorkflowPage,
    WorkflowState,
    WorkflowStatus,
    WorkflowStep,
    WorkflowSummary,
    added_steps,
    addition_id,
    cancel_id,
    cancel_task,
    check_workflow_id,
    checked_steps,
    manifest_tasks,
    workflow_of,
)

__all__ = ["QueueWorkflows", "ServedWorkflows"]

_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.02, 0.5, 1.5
"""seconds between two looks at a workflow that is awaited"""


@runtime_checkable
class ServedWorkflows(Protocol):
    """The workflows of a server, which publishes their steps itself. Not part of the contract."""

    async def put_workflow(self, workflow: str, steps: Sequence[WorkflowStep]) -> Confirmation:
        """Store a workflow."""

    async def add_steps(self, by: TaskRef, steps: Sequence[WorkflowStep]) -> Confirmation:
        """Store the steps that a step adds."""

    async def workflow_status(self, workflow: str) -> WorkflowStatus | None:
        """Return what became of a workflow; ``None`` if it is not known."""

    async def list_workflows(self, after: str | None, limit: int) -> WorkflowPage:
        """Return a page of workflows."""

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
        _check_types(steps)
        sorted_steps = checked_steps(steps)
        tasks = manifest_tasks(workflow, sorted_steps)
        if (served := self._served()) is not None:
            return self._accepted(await served.put_workflow(workflow, sorted_steps))
        self.demand()
        return await self._store(tasks)

    async def add(self, steps: Sequence[WorkflowStep], *, by: TaskRef) -> Confirmation:
        """Store the steps that a running step adds to its workflow. They are published once that step is done.

        ``by``: the task of that step, which can add steps once; the same steps again change nothing. The name of each
        is that of ``by``, a colon and its own. In ``after`` they have the names of one another, and other tasks.

        Raises `InvalidWorkflow` before anything is stored, also if the step has ended or the workflow is cancelled, or
        is not known (code ``unknown_workflow``), `IdConflict` if the step has added other steps, and
        `PublishUnconfirmed`.
        """
        workflow = workflow_of(by)
        check_workflow_id(workflow)
        _check_types(steps)
        tasks = manifest_tasks(workflow, added_steps(by, steps), by)
        if (served := self._served()) is not None:
            return self._accepted(await served.add_steps(by, steps))
        self.demand()
        await self._demand_room(workflow, by, steps)
        try:
            confirmation = await self._store(tasks)
        except IdConflict:
            raise IdConflict(
                f"the step {by.task_id!r} has added other steps in an earlier run: a handler that runs again must add "
                "the same steps",
                task_id=by.task_id,
            ) from None
        # Otherwise, the step could end and be forgotten before it is known that this task waits for it.
        await register(dependencies_of(self._backend), tasks[-1:])
        return confirmation

    async def _demand_room(self, workflow: str, by: TaskRef, steps: Sequence[WorkflowStep]) -> None:
        """Raise `InvalidWorkflow` unless a step may add steps, or has added some."""
        control = control_of(self._backend)
        main, cancelled, added = await control.statuses(
            WORKFLOWS, workflow, cancel_id(workflow), addition_id(by)
        )
        if added is not None:
            return
        if main is None:
            raise UnknownWorkflow(
                "by", "a step of a workflow that is not known", "a step of a workflow that is known"
            )
        if cancelled is not None:
            raise InvalidWorkflow(
                "by", "a step of a workflow that is cancelled", "a step of one that is not"
            )
        own = {
            parent: step.name
            for step in steps
            for parent in step.others
            if parent.task_id.rpartition(".")[0] == workflow
        }
        found = await gather_all(control.statuses(each.key, each.task_id) for each in (by, *own))
        adding, *parents = [status for (status,) in found]
        if adding is None or not adding.state.live:
            raise InvalidWorkflow("by", "a step that is not known or has ended", "a running step")
        for name, parent in zip(own.values(), parents, strict=True):
            if parent is None:
                got = "a step that the workflow does not have in this queue"
                raise InvalidWorkflow(f"steps.{name}.after", got, "steps that it has")

    async def _store(self, tasks: Sequence[Task]) -> Confirmation:
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
        graph = await read_graph(
            control_of(self._backend), dead_letters_of(self._backend), workflow
        )
        if graph is None:
            return None
        return WorkflowStatus.of(workflow, graph.main, graph.steps, graph.statuses, graph.additions)

    async def list(self, *, after: str | None = None, limit: int = 20) -> WorkflowPage:
        """Return a page of workflows: first those whose steps are not all published, then the others, newest first.

        ``limit`` is from 1 to 50; the states of all steps are read. ``after`` is `WorkflowPage.next` of the page
        before. A page may have fewer workflows, even none, and still name a next one. A workflow whose state changes
        between pages may be on two, or on none. Through a server, a page has those that `get` returns to the token.
        Raises `InvalidInput`, and `CapabilityMissing` without ``listing``.
        """
        check_page(after, limit)
        if (served := self._served()) is not None:
            return await served.list_workflows(after, limit)
        found, following = await self.page(after, limit, lambda _: True)
        summaries = tuple([WorkflowSummary.of(status) for status in found])
        return WorkflowPage(workflows=summaries, next=following)

    async def page(
        self, after: str | None, limit: int, is_shown: Callable[[WorkflowStatus], bool]
    ) -> tuple[tuple[WorkflowStatus, ...], str | None]:
        """Return the workflows of a page with their steps, and `WorkflowPage.next`, for a server that selects some."""
        self.demand()
        return await read_page(listing_of(self._backend), self.get, after, limit, is_shown)

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


def _check_types(steps: object) -> None:
    if not isinstance(steps, Sequence):
        raise InvalidInput("steps", kind_of(steps), "a list of WorkflowStep")
    for step in steps:
        if not isinstance(step, WorkflowStep):
            raise InvalidInput("steps", kind_of(step), "items that are a WorkflowStep")
