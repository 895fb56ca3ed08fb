"""Operations that concern several queues, or name theirs in a body: each verb, and each queue, right by right.

Workflows, schedules, tasks that wait for others, batches and results. The socket of workers accepts none of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from taskqueue_core import Every, Schedule, TaskTemplate, WorkflowState
from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import control_of
from taskqueue_core.tasks import Task
from taskqueue_core.workflows import WORKFLOWS, WorkflowStep
from tests.server.access import ALL, bearer, entry, write
from tests.server.support import Running, eventually, http, running

PARENT = {"key": "b", "task_id": "parent"}
AFTER = {"tasks": [PARENT], "inputs": [0]}
ONE, TWO = {"name": "one", "key": "a"}, {"name": "two", "key": "b", "after": ["one"]}
MEMBER = {"key": "a", "id": "member", "batch": {"key": "b", "task_id": "batch"}}
EVERY: Any = {"when": {"type": "every", "seconds": 3600}, "call": {"key": "a"}}
NDJSON = "application/x-ndjson"


def added(workflow: str, **step: Any) -> dict[str, Any]:
    """Return the body of a request in which the first step of a workflow adds another one."""
    return {"by": {"key": "a", "task_id": f"{workflow}.one"}, "steps": [{"name": "x"} | step]}


class Case(NamedTuple):
    """A request, the verbs of which one permits it, and the queues for each of which the token needs one."""

    what: str
    verbs: tuple[str, ...]
    keys: str
    method: str
    path: str
    body: Any = None
    kind: str = "application/json"


PUBLISH, READING = ("publish",), ("publish", "admin")
LOOKING = ("publish", "observe", "admin")
CASES = [
    Case("steps", PUBLISH, "ab", "POST", "/workflows", {"steps": [ONE, TWO]}),
    Case("a parent", PUBLISH, "ab", "POST", "/workflows", {"steps": [ONE | {"after": [PARENT]}]}),
    Case("an added step", PUBLISH, "ab", "POST", "/workflows/v/steps", added("v", key="b")),
    Case(
        *("a parent of an added step", PUBLISH, "ab", "POST", "/workflows/w/steps"),
        added("w", key="a", after=[PARENT]),
    ),
    Case("a workflow", LOOKING, "ab", "GET", "/workflows/v"),
    Case("cancel a workflow", READING, "ab", "POST", "/workflows/c/cancel"),
    Case("put a schedule", PUBLISH, "a", "PUT", "/schedules/new", {"schedule": EVERY}),
    Case("change a schedule", PUBLISH, "a", "PUT", "/schedules/s", {"schedule": EVERY}),
    Case("a schedule", ALL, "a", "GET", "/schedules/s"),
    Case("the next instants", ALL, "a", "GET", "/schedules/s/next"),
    Case("pause a schedule", READING, "a", "POST", "/schedules/s/pause"),
    Case("resume a schedule", READING, "a", "POST", "/schedules/s/resume"),
    Case("run a schedule", READING, "a", "POST", "/schedules/s/run", {}),
    Case("backfill", READING, "a", "POST", "/schedules/s/run", {"since": 3600, "until": 7200}),
    Case("delete a schedule", READING, "a", "DELETE", "/schedules/s"),
    Case("a child", PUBLISH, "ab", "POST", "/tasks", {"key": "a", "id": "1", "after": AFTER}),
    Case(
        *("a child in a batch request", PUBLISH, "ab", "POST", "/tasks/batch"),
        *({"key": "a", "id": "2", "after": AFTER}, NDJSON),
    ),
    Case(
        *("a child as a retry", PUBLISH, "ab", "POST", "/retries"),
        {"task": {"key": "a", "id": "3", "after": AFTER}, "delay": 60},
    ),
    Case("a member of a batch", PUBLISH, "ab", "POST", "/tasks", MEMBER),
    Case(
        *("a member in a batch request", PUBLISH, "ab", "POST", "/tasks/batch"),
        *(MEMBER | {"id": "other"}, NDJSON),
    ),
    Case("close a batch", PUBLISH, "b", "POST", "/tasks/b/batch/close"),
    Case("a result", READING, "b", "GET", "/tasks/b/done/result"),
    Case("results", READING, "b", "POST", "/queues/b/results", {"ids": ["done"]}),
    Case("a status", LOOKING, "b", "GET", "/tasks/b/done"),
    Case("statuses", LOOKING, "b", "POST", "/queues/b/statuses", {"ids": ["done"]}),
    Case("a list", ("observe", "admin"), "b", "GET", "/queues/b/tasks?state=done"),
    Case("another time", READING, "b", "POST", "/tasks/b/parent/reschedule", {"delay": 60}),
    Case("cancel a task", READING, "b", "DELETE", "/tasks/b/parent"),
]
TOKENS: dict[str, tuple[tuple[str, ...], str]] = {
    **{f"only {verb}": ((verb,), "ab") for verb in ALL},
    **{f"all of {key}": (ALL, key) for key in "ab"},
}
"""tokens with their verbs and their queues"""


def permits(token: str, case: Case) -> bool:
    """Return whether a token permits a request."""
    verbs, keys = TOKENS[token]
    return not set(verbs).isdisjoint(case.verbs) and set(keys) >= set(case.keys)


async def is_refused(client: httpx2.AsyncClient, case: Case, token: str) -> bool:
    """Send a request, and return whether the token does not permit it."""
    answer = await client.request(
        case.method,
        f"/v1{case.path}",
        content=None if case.body is None else json.dumps(case.body),
        headers=bearer(token) | {"content-type": case.kind},
    )
    if answer.status_code == 200 and case.kind == NDJSON:
        return bool(answer.json().get("code") == "forbidden")
    assert answer.status_code in {200, 201, 403}, (case.what, token, answer.text)
    return answer.status_code == 403


async def put_schedule(it: Running) -> None:
    """Store the schedule of the queue a, paused, so that it publishes nothing by itself."""
    await it.context.queue.schedules.put(
        Schedule("s", Every(3600), TaskTemplate(key="a"), paused=True)
    )


async def fill(it: Running) -> None:
    """Store what the requests are about, and wait until the workflows run."""
    await it.publish("done", key="b")
    async with it.backend.subscribe(["b"], "w") as subscription:
        await subscription.ack(*(await subscription.receive(1, 5)).deliveries, results=[b"1"])
    batch = TaskRef("b", "batch")
    await it.backend.publisher.publish(
        Task(key="b", id="parent"), Task(key="b", id="batch", batch=batch)
    )
    await put_schedule(it)
    steps = [WorkflowStep.of("one", "a"), WorkflowStep.of("two", "b", after=("one",))]
    for name in "vwc":
        await it.context.queue.workflows.put(steps, id=name)

    async def run() -> bool:
        found = [await it.context.queue.workflows.get(name) for name in "vwc"]
        return {each and each.state for each in found} == {WorkflowState.RUNNING}

    await eventually(run)


async def stored(it: Running) -> object:
    """Return what a request might change."""
    ledgers = [await control_of(it.backend).ledger(key) for key in ("a", "b", WORKFLOWS)]
    return ledgers, await it.context.queue.schedules.list()


async def test_each_right(tmp_path: Path) -> None:
    """Security 2, U13, U15, U16: each verb and each queue is demanded; what is refused stores nothing."""
    rows = [entry(token, verbs=verbs, keys=list(keys)) for token, (verbs, keys) in TOKENS.items()]
    path = write(tmp_path / "tokens.toml", *rows)
    async with running(tokens_file=path) as it, http(it) as client:
        await fill(it)
        before = await stored(it)
        for case in CASES:
            for token in TOKENS:
                if not permits(token, case):
                    assert await is_refused(client, case, token), (case.what, token)
        assert await stored(it) == before
        for case in CASES:
            for token in TOKENS:
                if permits(token, case):
                    await put_schedule(it)  # an earlier request may have deleted it
                    assert not await is_refused(client, case, token), (case.what, token)
