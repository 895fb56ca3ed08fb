"""The workflows of a server's backend, used over HTTP. The server publishes their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from taskqueue_core.after import TaskRef
from taskqueue_core.server_address import path
from taskqueue_core.tasks import Confirmation, Published
from taskqueue_core.workflows import (
    WORKFLOWS,
    WorkflowPage,
    WorkflowStatus,
    WorkflowStep,
    addition_id,
    workflow_of,
)
from taskqueue_remote.client import HttpClient
from taskqueue_remote.problems import problem_of

_UNKNOWN = "unknown_workflow"


class _Confirmed(msgspec.Struct, frozen=True):
    id: str
    status: Published


class _Cancelled(msgspec.Struct, frozen=True):
    cancelled: bool


class RemoteWorkflows:
    """The workflows of the server's backend. Each call sends an HTTP request."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def put_workflow(self, workflow: str, steps: Sequence[WorkflowStep]) -> Confirmation:
        """Store a workflow."""
        body: dict[str, Any] = {"id": workflow, "steps": steps}
        found = await self._client.ask("POST", "/v1/workflows", _Confirmed, body=body)
        return Confirmation(key=WORKFLOWS, task_id=found.id, status=found.status)

    async def add_steps(self, by: TaskRef, steps: Sequence[WorkflowStep]) -> Confirmation:
        """Store the steps that a step adds."""
        workflow = workflow_of(by)
        body: dict[str, Any] = {"by": by, "steps": steps}
        url = path("workflows", workflow, "steps")
        found = await self._client.ask("POST", url, _Confirmed, body=body)
        return Confirmation(key=WORKFLOWS, task_id=addition_id(by), status=found.status)

    async def workflow_status(self, workflow: str) -> WorkflowStatus | None:
        """Return what became of a workflow; ``None`` if it is not known."""
        answer = await self._client.fetch("GET", path("workflows", workflow))
        if problem_of(answer.status, answer.body).code == _UNKNOWN:
            return None
        if not answer.ok:
            raise self._client.error(answer)
        return self._client.decode(answer.body, WorkflowStatus)

    async def list_workflows(self, after: str | None, limit: int) -> WorkflowPage:
        """Return a page of workflows."""
        query: dict[str, str | int] = {"limit": limit} | ({} if after is None else {"after": after})
        return await self._client.ask("GET", "/v1/workflows", WorkflowPage, query=query)

    async def cancel_workflow(self, workflow: str) -> bool:
        """Cancel a workflow. Return False if it has ended or is not known."""
        answer = await self._client.fetch("POST", path("workflows", workflow, "cancel"))
        if problem_of(answer.status, answer.body).code == _UNKNOWN:
            return False
        if not answer.ok:
            raise self._client.error(answer)
        return self._client.decode(answer.body, _Cancelled).cancelled
