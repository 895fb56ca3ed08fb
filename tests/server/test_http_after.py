"""Tasks that wait for others, and batches, over HTTP: fields, answers, rights, and what is refused (U16)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from taskqueue_core.after import TaskRef
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.limits import LIMITS
from taskqueue_memory import MemoryBackend
from tests.server.access import ADMIN, A, bearer, entry, write
from tests.server.support import Running, http, problem, running

BATCH = {"key": "k", "task_id": "batch"}


def ref(task_id: str, key: str = "k") -> dict[str, str]:
    """Return the name of a task."""
    return {"key": key, "task_id": task_id}


def child(*parents: str, key: str = "k", **after: Any) -> dict[str, Any]:
    """Return the body of a task that waits for others."""
    return {"key": key, "id": "child", "after": {"tasks": [ref(each) for each in parents], **after}}


async def finish(backend: MemoryBackend, result: bytes = b"1") -> list[str]:
    """Run all tasks of a queue, and return their ids."""
    async with backend.subscribe(["k"], "w") as subscription:
        taken = (await subscription.receive(99, 0)).deliveries
        if taken:
            await subscription.ack(*taken, results=[result] * len(taken))
    return [each.task.id for each in taken]


async def test_a_task_waits(api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
    """U16: a task is blocked until its parents are done, in the status, the ledger and the list of queues."""
    await api.post("/v1/tasks", json={"key": "k", "id": "parent"})
    body = child("parent", inputs=[0])
    assert (await api.post("/v1/tasks", json=body)).status_code == 201
    assert (await api.post("/v1/tasks", json=body)).json()["status"] == "duplicate"
    assert (await api.get("/v1/tasks/k/child")).json()["state"] == "blocked"
    assert (await api.get("/v1/queues/k/ledger")).json()["blocked"] == 1
    (queue,) = (await api.get("/v1/queues")).json()["queues"]
    assert queue["ledger"]["blocked"] == 1
    later = await api.post("/v1/tasks/k/child/reschedule", json={"delay": 0})
    assert later.json() == {"rescheduled": True}
    assert await finish(backend, b'{"n": 1}') == ["parent"]
    async with backend.subscribe(["k"], "w") as subscription:
        (delivery,) = (await subscription.receive(9, 0)).deliveries
    assert delivery.inputs == (b'{"n": 1}',)


async def test_what_holds_it(api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
    """U16: the status names the dead letters that hold a task; a discard cancels it, with the reason."""
    await api.post("/v1/tasks", json={"key": "k", "id": "parent"})
    await api.post("/v1/tasks", json=child("parent"))
    async with backend.subscribe(["k"], "w") as subscription:
        (delivery,) = (await subscription.receive(9, 0)).deliveries
        await subscription.dead_letter(delivery, "broken")
    held = (await api.get("/v1/tasks/k/child")).json()
    assert (held["held_by"], held["waits_for"]) == ([ref("parent")], [ref("parent")])
    assert held["waits_for_total"] == 1
    assert (await api.get("/v1/queues/k")).json()["blocked_on_dead"] == 1
    assert 'taskqueue_blocked_on_dead{key="k"} 1.0' in (await api.get("/metrics")).text
    await api.post("/v1/queues/k/dead-letters/discard?confirm=k", json={"all": True})
    status = (await api.get("/v1/tasks/k/child")).json()
    assert (status["state"], status["error"], status["held_by"]) == (
        "cancelled",
        "parent_ended",
        [],
    )


async def test_a_batch(api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
    """U16: a batch is a task that ends once it was closed and its members have ended; later members are refused."""
    assert (await api.post("/v1/tasks/k/batch/close")).json() == {"closed": False}
    await api.post("/v1/tasks", json={"key": "k", "id": "batch", "batch": BATCH})
    lines = [{"key": "k", "id": name, "batch": BATCH} for name in ("a", "b")]
    content = b"\n".join(map(msgspec.json.encode, lines))
    kind = {"content-type": "application/x-ndjson"}
    answer = await api.post("/v1/tasks/batch", content=content, headers=kind)
    assert answer.text.count('"accepted"') == 2
    assert (await api.post("/v1/tasks/k/batch/close")).json() == {"closed": True}
    await backend.dependencies.tally(
        *await backend.dependencies.seal(TaskRef(**BATCH)), sealed=True
    )
    late = await api.post("/v1/tasks", json={"key": "k", "id": "late", "batch": BATCH})
    assert (late.status_code, late.json()["code"]) == (409, "batch_closed")
    assert await finish(backend) == ["a", "b"]
    await backend.dependencies.tally(*await backend.dependencies.seal(TaskRef(**BATCH)))
    assert (await api.get("/v1/tasks/k/batch")).json()["state"] == "done"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"after": {"tasks": []}}, "after.tasks"),
        ({"after": {"tasks": [ref("p")] * 2}}, "after.tasks"),
        ({"after": {"tasks": [ref(f"p{n}") for n in range(LIMITS.parents + 1)]}}, "after.tasks"),
        ({"after": {"tasks": [ref("child")]}}, "after.tasks"),
        ({"after": {"tasks": [ref("p", "two words")]}}, "after.tasks.key"),
        ({"after": {"tasks": [ref("")]}}, "after.tasks.task_id"),
        ({"after": {"tasks": ["p"]}}, "after.tasks[0]"),
        ({"after": {"tasks": [{"key": "k", "id": "p"}]}}, "after.tasks[0].id"),
        ({"after": {"tasks": [ref("p")], "when": "later"}}, "after.when"),
        ({"after": {"tasks": [ref("p")], "on_dead": "wait"}}, "after.on_dead"),
        ({"after": {"tasks": [ref("p")], "inputs": [1]}}, "after.inputs"),
        ({"after": {"tasks": [ref("p")], "inputs": [0, 0]}}, "after.inputs"),
        ({"after": {"tasks": [ref("p")], "result": True}}, "after.result"),
        ({"batch": ref("b", "two words")}, "batch.key"),
        ({"batch": ref("child"), "after": {"tasks": [ref("p")]}}, "after"),
    ],
)
async def test_bad_input(api: httpx2.AsyncClient, body: dict[str, Any], field: str) -> None:
    """U16: a wrong field is refused before anything is stored, by its name, alone and in a batch."""
    whole = {"key": "k", "id": "child", **body}
    answer = await api.post("/v1/tasks", json=whole)
    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text
    kind = {"content-type": "application/x-ndjson"}
    line = await api.post("/v1/tasks/batch", content=msgspec.json.encode(whole), headers=kind)
    assert (line.json()["status"], line.json()["field"]) == ("invalid", field)
    assert (await api.get("/v1/tasks/k/child")).status_code == 404


async def test_as_many_parents_as_allowed(api: httpx2.AsyncClient) -> None:
    """U16: a line of a batch may have the largest payload and 1000 parents with the longest names."""
    key = "k" * LIMITS.name
    parents = [ref(f"{number:x<{LIMITS.name}}", key) for number in range(LIMITS.parents)]
    payload = "x" * (LIMITS.payload - 2)
    body = {"key": key, "id": "child", "payload": payload, "after": {"tasks": parents}}
    kind = {"content-type": "application/x-ndjson"}
    answer = await api.post("/v1/tasks/batch", content=msgspec.json.encode(body), headers=kind)
    assert answer.json()["status"] == "accepted"


async def test_a_retry_of_an_unknown_task(api: httpx2.AsyncClient) -> None:
    """U16: the retry of a task that the store does not know is published, and waits for its parents."""
    await api.post("/v1/tasks", json={"key": "k", "id": "parent"})
    answer = await api.post("/v1/retries", json={"task": child("parent"), "delay": 0})
    assert answer.status_code == 201
    assert (await api.get("/v1/tasks/k/child")).json()["state"] == "blocked"
    again = await api.post("/v1/retries", json={"task": child("parent"), "delay": 0})
    assert again.json()["status"] == "duplicate"


@asynccontextmanager
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[Running, httpx2.AsyncClient]]:
    """Run a server with tokens for each verb on the queue b, all of which may publish to the queue a."""
    verbs = ("publish", "consume", "admin")
    rows = [entry(f"{verb} b", verbs=[verb], keys=["b"]) for verb in verbs]
    rows += [entry(ADMIN, "admin"), entry(A, "a", keys=["a"])]
    rows += [entry("publish both", verbs=["publish"], keys=["a", "b"])]
    async with (
        running(tokens_file=write(tmp_path / "tokens.toml", *rows)) as it,
        http(it) as client,
    ):
        await client.post("/v1/tasks", json={"key": "b", "id": "p"}, headers=bearer(ADMIN))
        yield it, client


async def test_a_parent_needs_the_right_to_read_it(tmp_path: Path) -> None:
    """Security 2, U16: a token for queue a gets no result of queue b by waiting for its tasks, in no way to publish."""
    async with guarded(tmp_path) as (it, client):
        after = {"tasks": [ref("p", "b")], "inputs": [0]}
        for token, key, status in (
            (A, "a", 403),
            ("publish both", "a", 201),
            ("publish b", "b", 201),
            ("consume b", "b", 403),
            ("admin b", "b", 403),
        ):
            body = {"key": key, "id": token.replace(" ", "-"), "after": after}
            answer = await client.post("/v1/tasks", json=body, headers=bearer(token))
            assert answer.status_code == status, (token, answer.text)
            problem_of = answer.json()
            if token == A:
                assert "after.tasks" in problem_of["detail"]
            retry: dict[str, Any] = {"task": {**body, "id": f"r-{body['id']}"}, "delay": 0}
            answer = await client.post("/v1/retries", json=retry, headers=bearer(token))
            assert answer.status_code == status, (token, answer.text)
        kind = {"content-type": "application/x-ndjson", **bearer(A)}
        lines: list[dict[str, Any]] = [
            {"key": "a", "id": "sound"},
            {"key": "a", "id": "spy", "after": after},
        ]
        content = b"\n".join(map(msgspec.json.encode, lines))
        answer = await client.post("/v1/tasks/batch", content=content, headers=kind)
        sound, spy = map(msgspec.json.decode, answer.text.splitlines())
        assert (sound["status"], spy["status"], spy["code"]) == ("accepted", "invalid", "forbidden")
        ledger = await it.ledger("a")
        assert (ledger.published, ledger.blocked) == (3, 2)


async def test_a_member_needs_the_right_to_publish_to_its_batch(tmp_path: Path) -> None:
    """Security 2, U16: a member holds up its batch, so it needs ``publish`` for the batch too; so does a close."""
    async with guarded(tmp_path) as (_, client):
        batch = ref("batch", "b")
        body = {"key": "b", "id": "batch", "batch": batch}
        assert (
            await client.post("/v1/tasks", json=body, headers=bearer("publish b"))
        ).status_code == 201
        for token, status in ((A, 403), ("publish both", 201)):
            body = {"key": "a", "id": token.replace(" ", "-"), "batch": batch}
            answer = await client.post("/v1/tasks", json=body, headers=bearer(token))
            assert answer.status_code == status, (token, answer.text)
        for token, status in ((A, 403), ("consume b", 403), ("admin b", 403), ("publish b", 200)):
            answer = await client.post("/v1/tasks/b/batch/close", headers=bearer(token))
            assert answer.status_code == status, (token, answer.text)


class _Without(MemoryBackend):
    capabilities = Capabilities(names=frozenset(Capability) - {Capability.AFTER})


async def test_a_store_without_the_capability() -> None:
    """U16, G2: a task that waits is refused by the name of the capability before anything is stored."""
    async with running(_Without()) as it, http(it) as client:
        await client.post("/v1/tasks", json={"key": "k", "id": "parent"})
        problem(await client.post("/v1/tasks", json=child("parent")), 501, "capability_missing")
        problem(await client.post("/v1/tasks/k/batch/close"), 501, "capability_missing")
        kind = {"content-type": "application/x-ndjson"}
        lines = [{"key": "k", "id": "sound"}, {"key": "k", "id": "member", "batch": BATCH}]
        content = b"\n".join(map(msgspec.json.encode, lines))
        answer = await client.post("/v1/tasks/batch", content=content, headers=kind)
        sound, member = map(msgspec.json.decode, answer.text.splitlines())
        assert (sound["status"], member["code"]) == ("accepted", "capability_missing")
        assert (await it.ledger()).published == 2
