"""Publishing many tasks in one HTTP request, with one JSON document per line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest

from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Confirmation, Task
from taskqueue_memory import MemoryBackend
from taskqueue_server.api import batch
from tests.server.support import http, problem, running

NDJSON = {"content-type": "application/x-ndjson"}


async def send(api: httpx2.AsyncClient, content: Any) -> list[dict[str, Any]]:
    """Publish a batch and return the result of each line."""
    answer = await api.post("/v1/tasks/batch", content=content, headers=NDJSON)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [msgspec.json.decode(line) for line in answer.content.splitlines()]


def lines(*tasks: dict[str, Any]) -> bytes:
    """Return the tasks as JSON lines."""
    return b"".join(msgspec.json.encode(task) + b"\n" for task in tasks)


async def test_one_answer_per_line_in_order(
    api: httpx2.AsyncClient, backend: MemoryBackend
) -> None:
    """D1: each line of a batch gets its own result, and invalid lines do not affect the other lines."""
    body = (
        lines({"key": "k", "id": "a"}, {"key": "k", "id": "b", "priority": 11})
        + b"not json\n\n"
        + lines({"key": "k", "id": "a"}, {"key": "k", "id": "a", "payload": 1})
        + b'{"key":"k","id":"c"}'
    )
    answers = await send(api, body)
    assert [answer["status"] for answer in answers] == [
        "accepted",
        "invalid",
        "invalid",
        "duplicate",
        "conflict",
        "accepted",
    ]
    assert (answers[1]["line"], answers[1]["code"], answers[1]["field"]) == (
        2,
        "invalid_input",
        "priority",
    )
    assert (answers[2]["line"], answers[2]["code"]) == (3, "not_json")
    assert [a.get("task_id") for a in answers] == ["a", None, None, "a", "a", "c"]
    assert (await backend.control.ledger("k")).published == 2


async def test_thousands_are_published_in_full_batches(
    api: httpx2.AsyncClient, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large batch calls the store once per thousand tasks and returns the results in the order of the lines."""
    sizes: list[int] = []
    publish = backend.publisher.publish

    async def counted(*tasks: Task) -> tuple[Confirmation, ...]:
        sizes.append(len(tasks))
        return await publish(*tasks)

    monkeypatch.setattr(backend.publisher, "publish", counted)
    answers = await send(api, lines(*({"key": "k", "id": f"t{n}"} for n in range(2500))))
    assert [answer["task_id"] for answer in answers] == [f"t{n}" for n in range(2500)]
    assert sizes == [LIMITS.batch, LIMITS.batch, 500]


async def test_lines_may_come_in_any_pieces(api: httpx2.AsyncClient) -> None:
    """Fault E7: a batch that arrives one byte at a time is accepted like one that arrives at once."""
    body = lines({"key": "k", "id": "a"}, {"key": "k", "id": "b"})

    async def bytewise() -> AsyncIterator[bytes]:
        for n in range(len(body)):
            yield body[n : n + 1]

    assert [a["task_id"] for a in await send(api, bytewise())] == ["a", "b"]


async def test_a_line_that_is_too_long_is_one_bad_line(api: httpx2.AsyncClient) -> None:
    """Fault K3: a line beyond the size limit is reported as invalid, and the lines after it are still published."""
    huge = {"key": "k", "payload": "x" * 700_000}
    whole = {"key": "k", "id": "b", "payload": "x" * (LIMITS.payload - 2)}
    answers = await send(api, lines({"key": "k", "id": "a"}, huge, whole, huge))
    assert [a["status"] for a in answers] == ["accepted", "invalid", "accepted", "invalid"]
    assert [a.get("code") for a in answers] == [None, "too_large", None, "too_large"]
    assert [a.get("line") for a in answers] == [None, 2, None, 4]


async def test_an_empty_body_has_an_empty_answer(api: httpx2.AsyncClient) -> None:
    """A batch without tasks gets an empty response; empty lines are skipped."""
    assert await send(api, b"") == []
    assert await send(api, b"\n \n") == []


async def test_so_many_lines_and_no_more(
    api: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with the maximum number of lines is accepted; one more line is refused with 413."""
    monkeypatch.setattr(batch, "MAX_LINES", 3)
    assert len(await send(api, b"{}\n" * 3)) == 3
    answer = await api.post("/v1/tasks/batch", content=b"{}\n" * 4, headers=NDJSON)
    problem(answer, 413, "too_many")


async def test_an_outage_is_an_error_as_a_whole(
    api: httpx2.AsyncClient, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: if the store fails in the middle of a batch, the response is 503 and nothing is reported as confirmed.

    Sending the batch again with the same ids publishes nothing twice.
    """
    publish = backend.publisher.publish

    async def once(*tasks: Task) -> tuple[Confirmation, ...]:
        if tasks[0].id != "t0":
            raise BackendUnavailable("away")
        return await publish(*tasks)

    body = lines(*({"key": "k", "id": f"t{n}"} for n in range(LIMITS.batch + 1)))
    with monkeypatch.context() as patch:
        patch.setattr(backend.publisher, "publish", once)
        answer = await api.post("/v1/tasks/batch", content=body, headers=NDJSON)
        problem(answer, 503, "backend_unavailable")
        assert answer.headers["retry-after"]
    answers = await send(api, body)
    statuses = [answer["status"] for answer in answers]
    assert statuses == ["duplicate"] * LIMITS.batch + ["accepted"]


async def test_the_wrong_type_of_body(api: httpx2.AsyncClient) -> None:
    """Fault K5: a request with the wrong content type is refused with 415."""
    problem(await api.post("/v1/tasks/batch", json={"key": "k"}), 415, "content_type")
    answer = await api.post("/v1/tasks", content=b"{}", headers=NDJSON)
    problem(answer, 415, "content_type")
    answer = await api.post("/v1/tasks", content=b"{}")
    problem(answer, 415, "content_type")


async def test_a_body_without_an_end() -> None:
    """Fault K5: a chunked request body without an end is refused once it exceeds the limit."""
    async with running() as it, http(it) as client:

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(2 * LIMITS.body // 100_000):
                yield b" " * 99_999 + b"\n"

        try:
            answer = await client.post("/v1/tasks/batch", content=endless(), headers=NDJSON)
            problem(answer, 413, "too_large")
        except httpx2.TransportError:
            pass  # the server may close the connection before the client has sent everything
        assert (await client.get("/health")).status_code == 200
