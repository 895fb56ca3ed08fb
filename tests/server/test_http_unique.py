"""Unique keys over HTTP: the field ``unique`` of a task, the answers, and what is refused (U12)."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec
import pytest

from taskqueue_memory import MemoryBackend


async def _publish(api: httpx2.AsyncClient, task_id: str, **unique: Any) -> httpx2.Response:
    body = {"key": "k", "id": task_id, "payload": task_id, "unique": {"key": "w", **unique}}
    return await api.post("/v1/tasks", json=body)


async def test_every_answer(api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
    """U12: kept out and replaced are 200 with the id of the holder, refused is 409 without Retry-After."""
    assert (await _publish(api, "a")).status_code == 201
    kept = await _publish(api, "b")
    assert kept.status_code == 200
    assert kept.json() == {"key": "k", "task_id": "b", "status": "duplicate", "existing_id": "a"}
    refused = await _publish(api, "b", on_conflict="refuse")
    assert (refused.status_code, refused.json()["code"]) == (409, "not_unique")
    assert refused.json()["existing_id"] == "a"
    assert "retry-after" not in refused.headers
    for _ in range(2):
        replaced = await _publish(api, "b", on_conflict="replace")
        assert (replaced.status_code, replaced.json()["status"]) == (200, "replaced")
    assert (await api.get("/v1/tasks/k/b")).status_code == 404
    assert (await api.get("/v1/tasks/k/a")).json()["state"] == "waiting"
    assert (await backend.control.ledger("k")).published == 1


async def test_a_debounce(api: httpx2.AsyncClient) -> None:
    """U12: a debounce puts the task off, by the clock of the store."""
    wait = {"seconds": 30, "max_wait": 300}
    assert (await _publish(api, "a", on_conflict="replace", debounce=wait)).status_code == 201
    status = (await api.get("/v1/tasks/k/a")).json()
    assert status["state"] == "scheduled"
    again = await _publish(api, "b", on_conflict="replace", debounce=wait)
    assert again.json()["existing_id"] == "a"
    assert (await api.get("/v1/tasks/k/a")).json()["due_at"] >= status["due_at"]


@pytest.mark.parametrize(
    ("unique", "more", "field"),
    [
        ({"key": ""}, {}, "unique.key"),
        ({"key": "w", "period": 0}, {}, "unique.period"),
        ({"key": "w", "until": "done"}, {}, "unique.until"),
        ({"key": "w", "perod": 5}, {}, "unique.perod"),
        ({"key": "w", "debounce": {"seconds": 5}}, {}, "debounce"),
        (
            {"key": "w", "on_conflict": "replace", "debounce": {"seconds": 5}},
            {"ordering_key": "e"},
            "debounce",
        ),
        (
            {"key": "w", "on_conflict": "replace", "debounce": {"seconds": 5}},
            {"delay": 5},
            "debounce",
        ),
    ],
)
async def test_bad_input(
    api: httpx2.AsyncClient, unique: dict[str, Any], more: dict[str, Any], field: str
) -> None:
    """U12: a wrong field is refused before anything is stored, by its name, alone and in a batch."""
    body = {"key": "k", "id": "a", "unique": unique, **more}
    answer = await api.post("/v1/tasks", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    kind = {"content-type": "application/x-ndjson"}
    line = await api.post("/v1/tasks/batch", content=msgspec.json.encode(body), headers=kind)
    assert (line.json()["status"], line.json()["field"]) == ("invalid", field)
    assert (await api.get("/v1/tasks/k/a")).status_code == 404


async def test_a_retry_of_an_unknown_task(api: httpx2.AsyncClient) -> None:
    """U12: the retry of an unknown task with a debounce is published at the time of the retry."""
    unique = {"key": "w", "on_conflict": "replace", "debounce": {"seconds": 5}}
    body = {"task": {"key": "k", "id": "a", "unique": unique}, "delay": 60}
    assert (await api.post("/v1/retries", json=body)).status_code == 201
    assert (await api.get("/v1/tasks/k/a")).json()["state"] == "scheduled"
