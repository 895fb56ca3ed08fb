"""Many tasks in one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest

from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.limits import LIMITS
from taskqueue_core.server.api import batch as http_batch
from taskqueue_core.tasks import Confirmation, Task
from taskqueue_memory import MemoryBackend
from tests.server.support import http, problem, running

NDJSON = {"content-type": "application/x-ndjson"}


async def send(api: httpx2.AsyncClient, content: Any) -> list[dict[str, Any]]:
    """Publish, and return the answers."""
    answer = await api.post("/v1/tasks/batch", content=content, headers=NDJSON)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [msgspec.json.decode(line) for line in answer.content.splitlines()]


def lines(*tasks: dict[str, Any]) -> bytes:
    """Tasks as lines."""
    return b"".join(msgspec.json.encode(task) + b"\n" for task in tasks)


async def test_one_answer_per_line_in_order(
    api: httpx2.AsyncClient, backend: MemoryBackend
) -> None:
    """D1: each line has its own answer, and bad ones do not hold up the others."""
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
    """The store is called once per thousand tasks, and the answers keep their order."""
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
    """Fault E7: one byte at a time is as good as all at once."""
    body = lines({"key": "k", "id": "a"}, {"key": "k", "id": "b"})

    async def bytewise() -> AsyncIterator[bytes]:
        for n in range(len(body)):
            yield body[n : n + 1]

    assert [a["task_id"] for a in await send(api, bytewise())] == ["a", "b"]


async def test_a_line_that_is_too_long_is_one_bad_line(api: httpx2.AsyncClient) -> None:
    """Fault K3: it is not kept, and the next one counts."""
    huge = {"key": "k", "payload": "x" * 700_000}
    whole = {"key": "k", "id": "b", "payload": "x" * (LIMITS.payload - 2)}
    answers = await send(api, lines({"key": "k", "id": "a"}, huge, whole, huge))
    assert [a["status"] for a in answers] == ["accepted", "invalid", "accepted", "invalid"]
    assert [a.get("code") for a in answers] == [None, "too_large", None, "too_large"]
    assert [a.get("line") for a in answers] == [None, 2, None, 4]


async def test_an_empty_body_has_an_empty_answer(api: httpx2.AsyncClient) -> None:
    """Empty lines are no tasks."""
    assert await send(api, b"") == []
    assert await send(api, b"\n \n") == []


async def test_so_many_lines_and_no_more(
    api: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit itself passes, one line more does not."""
    monkeypatch.setattr(http_batch, "MAX_LINES", 3)
    assert len(await send(api, b"{}\n" * 3)) == 3
    answer = await api.post("/v1/tasks/batch", content=b"{}\n" * 4, headers=NDJSON)
    problem(answer, 413, "too_many")


async def test_an_outage_is_an_error_as_a_whole(
    api: httpx2.AsyncClient, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: what is not confirmed is not claimed; sending all again with the same ids is safe."""
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
    """Fault K5: types are what they say."""
    problem(await api.post("/v1/tasks/batch", json={"key": "k"}), 415, "content_type")
    answer = await api.post("/v1/tasks", content=b"{}", headers=NDJSON)
    problem(answer, 415, "content_type")
    answer = await api.post("/v1/tasks", content=b"{}")
    problem(answer, 415, "content_type")


class TestBodiesOnTheWire:
    """Fault K5: bodies that lie, never end or never come."""

    async def test_too_large_by_its_own_word(self) -> None:
        """A length beyond the limit is refused before the body comes."""
        async with running() as it:
            for length in (LIMITS.body + 1, 10**30):
                head = f"content-length: {length}\r\n"
                status = await raw(it.server.url, head, [b'{"key":'])
                assert b" 413 " in status or b" 400 " in status

    async def test_too_large_without_a_word(self) -> None:
        """A body in chunks is cut off at the limit."""
        async with running() as it, http(it) as client:

            async def endless() -> AsyncIterator[bytes]:
                for _ in range(2 * LIMITS.body // 100_000):
                    yield b" " * 99_999 + b"\n"

            try:
                answer = await client.post("/v1/tasks/batch", content=endless(), headers=NDJSON)
                problem(answer, 413, "too_large")
            except httpx2.TransportError:
                pass  # the server closed while it was still being written to
            assert (await client.get("/health")).status_code == 200

    async def test_too_slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A body that does not arrive ends the request."""
        monkeypatch.setattr("taskqueue_core.server.api.bodies.BODY_SECONDS", 0.1)
        async with running() as it:
            assert b" 408 " in await raw(it.server.url, "content-length: 100\r\n", [b'{"key":'])

    async def test_a_huge_head(self) -> None:
        """Fault K1: a head of 1 MB is refused, not kept."""
        async with running() as it:
            status = await raw(it.server.url, "x-padding: " + "x" * 1_000_000 + "\r\n", [])
            assert status == b"" or b" 400 " in status


async def raw(url: str, head: str, pieces: list[bytes]) -> bytes:
    """The first line of an answer to a hand-made request."""
    _, port = url.rsplit(":", 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    try:
        writer.write(
            b"POST /v1/tasks HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            + head.encode()
            + b"\r\n"
        )
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        return await asyncio.wait_for(reader.readline(), 3)
    except ConnectionError:
        return b""
    finally:
        writer.close()
