"""Publish a run of a Prefect task to the queue without a Prefect server. Usage: ``python submit.py``.

`submit` works like ``task.delay``: it writes the parameters to the result storage, which workers can read, and
publishes the run without the parameters.
"""

import asyncio
import os
from typing import Any
from uuid import uuid4

import httpx
from prefect import Task
from prefect.client.schemas.objects import TaskRun
from prefect.context import serialize_context
from prefect.results import ResultStore, get_or_create_default_task_scheduling_storage
from prefect.states import Scheduled
from prefect.task_worker import store_parameters


async def submit(task: Task[..., Any], **parameters: Any) -> str:
    """Create a run of ``task`` and return its id. It is executed at most once after a worker has acked it."""
    state = Scheduled()
    state.state_details.deferred = True
    state.state_details.task_parameters_id = uuid4()
    storage = await get_or_create_default_task_scheduling_storage()
    store = await ResultStore(result_storage=storage).aupdate_for_task(task)
    stored = {"parameters": parameters, "context": serialize_context()}
    await store_parameters(store, state.state_details.task_parameters_id, stored)
    run = TaskRun(
        name=task.name,
        task_key=task.task_key,
        dynamic_key=f"{task.task_key}-{uuid4().hex}",
        state=state,
    )
    body = {"key": task.task_key, "id": str(run.id), "payload": run.model_dump(mode="json")}
    await _publish(body)
    return str(run.id)


async def _publish(body: dict[str, Any]) -> None:
    server = os.environ["PREFECT_API_URL"].removesuffix("/api")
    headers = {}
    if token := os.environ.get("PREFECT_API_AUTH_STRING"):
        headers["Authorization"] = f"Bearer {token}"
    async with httpx.AsyncClient(headers=headers) as client:
        (await client.post(f"{server}/v1/tasks", json=body)).raise_for_status()


if __name__ == "__main__":
    from tasks import count

    print(asyncio.run(submit(count, name="count.txt", times=3)))
