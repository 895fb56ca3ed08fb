"""The ``Idempotency-Key`` header: a request that is sent again publishes the same task."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from taskqueue_core.hooks import Identity
from taskqueue_memory import MemoryBackend
from tests.server.support import app_client, problem

_NDJSON = {"content-type": "application/x-ndjson"}


async def publish(
    api: httpx2.AsyncClient, key: str, body: dict[str, Any], **headers: str
) -> httpx2.Response:
    """Publish a task with an Idempotency-Key header."""
    return await api.post("/v1/tasks", json=body, headers={"idempotency-key": key, **headers})


async def test_sent_again_it_is_the_same_task(api: httpx2.AsyncClient) -> None:
    """Law 7: requests with the same idempotency key publish one task and return its id each time.

    The key may be written with or without quotes.
    """
    body = {"key": "k", "payload": {"x": 1}}
    first = await publish(api, '"order 1"', body)
    assert (first.status_code, first.json()["status"]) == (201, "accepted")
    again = await publish(api, '"order 1"', body)
    assert (again.status_code, again.json()["status"]) == (200, "duplicate")
    assert again.json()["task_id"] == first.json()["task_id"]
    for key, other in (('"order2"', body), ('"order 1"', {"key": "k2", "payload": {"x": 1}})):
        assert (await publish(api, key, other)).status_code == 201
    assert (await publish(api, "order2", body)).status_code == 200
    assert (await api.get("/v1/ledger")).json()["published"] == 3


async def test_another_body_is_an_error(api: httpx2.AsyncClient) -> None:
    """Law 7: an idempotency key that was used for another payload is a client error, and nothing is stored."""
    await publish(api, "a", {"key": "k", "payload": 1})
    answer = await publish(api, "a", {"key": "k", "payload": 2})
    problem(answer, 422, "idempotency_key_reused", "Idempotency-Key")
    answer = await publish(api, "a", {"key": "k", "id": "b", "payload": 1})
    problem(answer, 422, "invalid_input", "id")
    assert (await api.get("/v1/ledger")).json()["published"] == 1


@pytest.mark.parametrize("key", ["", '""', '"', "a b", 'a"b', "x" * 201, '"a\\b"', "é"])
async def test_what_is_no_key(api: httpx2.AsyncClient, key: str) -> None:
    """Fault K2: an invalid idempotency key is refused with the header's name; the key is not repeated."""
    header = {b"idempotency-key": key.encode()}
    answer = await api.post("/v1/tasks", json={"key": "k"}, headers=header)
    problem(answer, 422, "invalid_input", "Idempotency-Key")
    assert (await api.get("/v1/ledger")).json()["published"] == 0


async def test_only_one(api: httpx2.AsyncClient) -> None:
    """Fault K2: a request with two idempotency keys is refused."""
    headers = [("idempotency-key", "a"), ("idempotency-key", "b")]
    answer = await api.post("/v1/tasks", json={"key": "k"}, headers=headers)
    problem(answer, 422, "invalid_input", "Idempotency-Key")


async def test_batches(api: httpx2.AsyncClient) -> None:
    """A batch that is sent again with its idempotency key publishes nothing twice.

    A line with its own task id is reported as invalid.
    """
    body = b'{"key":"k","payload":1}\n{"key":"k","payload":1}\n\n{"key":"k","id":"own"}\n'
    headers = {**_NDJSON, "idempotency-key": "b"}
    told = []
    for _ in range(2):
        answer = await api.post("/v1/tasks/batch", content=body, headers=headers)
        lines = [httpx2.Response(200, text=line).json() for line in answer.text.splitlines()]
        told.append([(line["status"], line.get("task_id")) for line in lines])
    (one, two, three), (again, _, _) = told
    assert (one[0], two[0], three[0]) == ("accepted", "accepted", "invalid")
    assert again == ("duplicate", one[1])
    assert one[1] != two[1]
    assert (await api.get("/v1/ledger")).json()["published"] == 2


async def test_each_token_has_keys_of_its_own() -> None:
    """Security 2: each identity has its own idempotency keys.

    Otherwise a client could find the task of another by guessing its key.
    """
    async with app_client(MemoryBackend(), lambda token: Identity(name=token)) as client:
        ids = set()
        for token in ("a", "b"):
            body = {"key": "k", "payload": token}
            answer = await publish(client, "same", body, authorization=f"Bearer {token}")
            assert answer.status_code == 201
            ids.add(answer.json()["task_id"])
        assert len(ids) == 2
