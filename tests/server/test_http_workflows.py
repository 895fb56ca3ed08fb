"""Workflows over HTTP, and the rights that they need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of
from taskqueue_core.hooks import INTERNAL_QUEUES
from taskqueue_core.limits import LIMITS
from taskqueue_core.workflows import WORKFLOWS
from taskqueue_memory import MemoryBackend
from tests.server.access import ADMIN, A, B, bearer, entry, write
from tests.server.support import Running, http, problem, running

URL = "/v1/workflows"
BOTH = "tq_publishes-to-a-and-b"
READS = "tq_consumes-b"


def workflow(*steps: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a body; steps are keys with the other fields, and their names are numbers."""
    return {
        "steps": [{"name": f"s{n}", "key": key} | fields for n, (key, fields) in enumerate(steps)]
    } | more


@asynccontextmanager
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """Run a server that requires a token."""
    rows = [
        entry(ADMIN, "admin"),
        entry(A, "a", keys=("a",)),
        entry(B, "b", keys=("b",)),
        entry(BOTH, "both", verbs=("publish",), keys=("a", "b", WORKFLOWS)),
        entry(READS, "reads", verbs=("publish",), keys=("a",)),
    ]
    path = write(tmp_path / "tokens.toml", *rows)
    async with running(MemoryBackend(), tokens_file=path) as it, http(it) as client:
        yield it, client


async def state(client: httpx2.AsyncClient, url: str, wanted: str, **more: Any) -> dict[str, Any]:
    """Wait until a workflow has a state, and return it."""
    async with asyncio.timeout(60):
        while True:
            found: dict[str, Any] = (await client.get(url, **more)).json()
            if found["state"] == wanted:
                return found
            await asyncio.sleep(0.01)


async def stored(backend: Backend) -> tuple[str, ...]:
    """Return the queues of a store."""
    return await control_of(backend).queues()


async def test_publish_read_and_cancel() -> None:
    """U15: a workflow is published, its steps are read by state, and it is cancelled."""
    body = workflow(("a", {}), ("b", {"after": ["s0"], "inputs": [0], "payload": {"$input": 0}}))
    async with running() as it, http(it) as client:
        answer = await client.post(URL, json=body | {"id": "w"})
        assert (answer.status_code, answer.json()) == (201, {"id": "w", "status": "accepted"})
        again = await client.post(URL, json=body | {"id": "w"})
        assert (again.status_code, again.json()) == (200, {"id": "w", "status": "duplicate"})
        other = body | {"id": "w", "steps": body["steps"][:1]}
        problem(await client.post(URL, json=other), 409, "id_conflict")
        found = await state(client, f"{URL}/w", "running")
        assert [(s["name"], s["task_id"], s["status"]["state"]) for s in found["steps"]] == [
            ("s0", "w.s0", "waiting"),
            ("s1", "w.s1", "blocked"),
        ]
        answer = await client.post(f"{URL}/w/cancel")
        assert answer.json() == {"cancelled": True}
        found = await state(client, f"{URL}/w", "ended")
        assert {step["status"]["state"] for step in found["steps"]} == {"cancelled"}
        assert (await client.post(f"{URL}/w/cancel")).json() == {"cancelled": False}
        problem(await client.get(f"{URL}/never"), 404, "unknown_workflow")
        problem(await client.post(f"{URL}/never/cancel"), 404, "unknown_workflow")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (workflow(), "steps"),
        (workflow(("a", {"after": ["s1"]}), ("a", {"after": ["s0"]})), "steps.s0.after"),
        (workflow(("a", {"after": ["x"]})), "steps.s0.after"),
        (workflow(("a", {"name": "x"}), ("a", {"name": "x"})), "steps.x.name"),
        (workflow(("a", {"priority": 10})), "steps.0.priority"),
        (workflow(("a", {"name": "x.y"})), "steps.0.name"),
        (workflow(("a", {"delay": 1, "not_before": 2})), "steps.0.delay"),
        (workflow(("a", {}), id="<w"), "id"),
        (workflow(*[("a", {})] * (LIMITS.steps + 1)), "steps"),
        (workflow(*[("a", {"payload": "x" * 250_000})] * 17), "steps"),
        (workflow(("a", {"unique": {"key": "w"}})), "steps[0].unique"),
        (workflow(("a", {"headers": {f"h{n}": "x" for n in range(31)}})), "steps.0.headers"),
    ],
    ids=[
        *("empty", "cycle", "unknown", "twice", "priority", "dot", "times", "id", "many", "large"),
        *("unique", "headers"),
    ],
)
async def test_bad_input(body: dict[str, Any], field: str) -> None:
    """U15: a workflow that is wrong is refused with the field, before anything is stored."""
    async with running() as it, http(it) as client:
        answer = await client.post(URL, json=body)
        assert answer.status_code == 422, answer.text
        assert answer.json()["field"] == field
        assert await stored(it.backend) == ()


REF = {"key": "b", "task_id": "x"}


@pytest.mark.parametrize(
    ("token", "body", "status"),
    [
        (A, workflow(("a", {})), 201),
        (A, workflow(("b", {})), 403),
        (A, workflow(("a", {}), ("b", {"after": ["s0"]})), 403),
        (A, workflow(("a", {"after": [REF]})), 403),
        (A, workflow(("a", {"after": [REF], "inputs": [0]})), 403),
        (B, workflow(("a", {"after": [REF]})), 403),
        (READS, workflow(("a", {"after": [REF]})), 403),
        (BOTH, workflow(("a", {}), ("b", {"after": ["s0"]})), 201),
        (BOTH, workflow(("a", {"after": [REF]})), 201),
        (BOTH, workflow((WORKFLOWS, {})), 403),
        (BOTH, workflow(("a", {"after": [{"key": WORKFLOWS, "task_id": "x"}]})), 403),
        (ADMIN, workflow(("a", {}), ("b", {"after": [REF]})), 201),
    ],
)
async def test_rights(tmp_path: Path, token: str, body: dict[str, Any], status: int) -> None:
    """U15: each step's queue and each parent's queue needs its right, and nothing is stored without all of them."""
    async with guarded(tmp_path) as (it, client):
        answer = await client.post(URL, json=body, headers=bearer(token))
        assert answer.status_code == status, answer.text
        if status == 403:
            assert await stored(it.backend) == ()


ADDED = {"by": {"key": "b", "task_id": "w.s0"}, "steps": [{"name": "x", "key": "a"}]}


@pytest.mark.parametrize(
    ("token", "changes", "status"),
    [
        (ADMIN, {}, 201),
        (BOTH, {}, 201),
        (A, {}, 403),
        (READS, {}, 403),
        (B, {}, 403),
        (B, {"steps": [{"name": "x", "key": "b"}]}, 201),
        (B, {"steps": [{"name": "x", "key": "b", "after": [REF | {"key": "a"}]}]}, 403),
        (BOTH, {"steps": [{"name": "x", "key": WORKFLOWS}]}, 403),
        (BOTH, {"steps": [{"name": "x", "key": "a", "after": [REF | {"key": WORKFLOWS}]}]}, 403),
        (BOTH, {"by": {"key": WORKFLOWS, "task_id": "w.s0"}}, 403),
    ],
)
async def test_rights_to_add_steps(
    tmp_path: Path, token: str, changes: dict[str, Any], status: int
) -> None:
    """U15: adding steps needs a right for the adding step's queue, and those of the added steps."""
    async with guarded(tmp_path) as (it, client):
        await client.post(URL, json=workflow(("b", {}), id="w"), headers=bearer(ADMIN))
        await state(client, f"{URL}/w", "running", headers=bearer(ADMIN))
        before = await control_of(it.backend).ledger(WORKFLOWS)
        answer = await client.post(f"{URL}/w/steps", json=ADDED | changes, headers=bearer(token))
        assert answer.status_code == status, answer.text
        if status == 403:
            assert await control_of(it.backend).ledger(WORKFLOWS) == before


async def test_adding_steps() -> None:
    """U15: steps are added over HTTP, once; wrong requests name the field."""
    async with running() as it, http(it) as client:
        await client.post(URL, json=workflow(("b", {}), id="w"))
        await state(client, f"{URL}/w", "running")
        for code, status in ((201, "accepted"), (200, "duplicate")):
            answer = await client.post(f"{URL}/w/steps", json=ADDED)
            assert (answer.status_code, answer.json()) == (code, {"id": "w", "status": status})
        other = ADDED | {"steps": [{"name": "y", "key": "a"}]}
        problem(await client.post(f"{URL}/w/steps", json=other), 409, "id_conflict")
        for target, body, field in (
            ("w", ADDED | {"steps": []}, "steps"),
            ("w", ADDED | {"steps": [{"name": "x", "key": "a", "after": ["s0"]}]}, "steps.x.after"),
            ("w", ADDED | {"by": {"key": "b", "task_id": "v.s0"}}, "by.task_id"),
            ("w", ADDED | {"by": {"key": "b", "task_id": "s0"}}, "by"),
        ):
            answer = await client.post(f"{URL}/{target}/steps", json=body)
            assert (answer.status_code, answer.json()["field"]) == (422, field)
        never = ADDED | {"by": {"key": "b", "task_id": "never.s0"}}
        problem(await client.post(f"{URL}/never/steps", json=never), 404, "unknown_workflow", "by")
        async with it.backend.subscribe(["b"], "worker") as subscription:
            await subscription.ack(*(await subscription.receive(1, 5)).deliveries)
        async with it.backend.subscribe(["a"], "worker") as subscription:
            (delivery,) = (await subscription.receive(1, 30)).deliveries
            assert delivery.task.id == "w.s0:x"
            await subscription.ack(delivery)
        found = await state(client, f"{URL}/w", "ended")
        assert [(step["name"], step["after"]) for step in found["steps"]] == [
            ("s0", []),
            ("s0:x", ["s0"]),
        ]


async def test_lists(tmp_path: Path) -> None:
    """Security 2, U15, U18: a list has the workflows that the token may read, by pages, newest first."""
    async with guarded(tmp_path) as (_, client):
        for name, key in (("w1", "a"), ("w2", "b"), ("w3", "a")):
            await client.post(URL, json=workflow((key, {}), id=name), headers=bearer(ADMIN))
            await state(client, f"{URL}/{name}", "running", headers=bearer(ADMIN))
        for token, names in (
            (ADMIN, ["w3", "w2", "w1"]),
            (BOTH, ["w3", "w2", "w1"]),
            (A, ["w3", "w1"]),
            (B, ["w2"]),
        ):
            found = (await client.get(URL, headers=bearer(token))).json()
            assert [each["id"] for each in found["workflows"]] == names
            assert "next" not in found
        full = (await client.get(URL, params={"limit": 2}, headers=bearer(A))).json()
        assert [each["id"] for each in full["workflows"]] == ["w3", "w1"]
        first = await client.get(URL, params={"limit": 2}, headers=bearer(ADMIN))
        assert [each["id"] for each in first.json()["workflows"]] == ["w3", "w2"]
        assert 'rel="next"' in first.headers["link"]
        query = {"limit": 2, "after": first.json()["next"]}
        (last,) = (await client.get(URL, params=query, headers=bearer(ADMIN))).json()["workflows"]
        assert (last["id"], last["state"], last["steps"]) == ("w1", "running", 1)
        assert last["counts"] == {"waiting": 1}
        for wrong, field in (
            ({"after": "x"}, "after"),
            ({"after": "5.!"}, "after"),
            ({"limit": "51"}, "limit"),
        ):
            answer = await client.get(URL, params=wrong, headers=bearer(ADMIN))
            problem(answer, 422, "invalid_input", field)


async def test_rights_to_read_and_to_cancel(tmp_path: Path) -> None:
    """U15: a workflow is shown and cancelled only with the right for the queue of each step."""
    body = workflow(("a", {}), ("b", {"after": ["s0"]}), id="w")
    async with guarded(tmp_path) as (_, client):
        await client.post(URL, json=body, headers=bearer(BOTH))
        await state(client, f"{URL}/w", "running", headers=bearer(ADMIN))
        for token, status in ((A, 403), (B, 403), (BOTH, 200)):
            assert (await client.get(f"{URL}/w", headers=bearer(token))).status_code == status
        for token, status in ((A, 403), (B, 403), (BOTH, 200)):
            answer = await client.post(f"{URL}/w/cancel", headers=bearer(token))
            assert answer.status_code == status


async def test_no_client_publishes_to_the_internal_queue(tmp_path: Path) -> None:
    """U15: no token permits to publish to the queue of workflows, not even one that names it."""
    assert WORKFLOWS not in INTERNAL_QUEUES
    async with guarded(tmp_path) as (it, client):
        for token in (ADMIN, BOTH):
            task = {"key": WORKFLOWS, "id": "w"}
            answer = await client.post("/v1/tasks", json=task, headers=bearer(token))
            problem(answer, 403, "forbidden")
            answer = await client.post(
                "/v1/tasks/batch",
                content='{"key": "_taskqueue.workflows"}\n',
                headers=bearer(token) | {"content-type": "application/x-ndjson"},
            )
            assert answer.json()["code"] == "forbidden"
        assert await stored(it.backend) == ()
