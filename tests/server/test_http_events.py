"""Events of tasks over HTTP: who may read them, tickets for browsers, and readers that are many or slow (U19)."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.types import Message

from taskqueue_conformance.suites.streams import new
from taskqueue_core.capabilities import QueueSettings, control_of, streams_of
from taskqueue_core.concurrency import wait_forever
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.tasks import Delivery
from taskqueue_server.api import events as api
from taskqueue_server.auth.tickets import Tickets, expiring
from taskqueue_server.context import server as server_context
from taskqueue_server.routing import event_stream, operations
from tests.server.access import bearer, entry, write
from tests.server.support import Running, eventually, http, problem, running

OWNER, OBSERVER, OTHER = "tq_owns-a", "tq_looks-only", "tq_owns-b"
PATH = "/v1/tasks/a/t1/events"
SSE = {"accept": "text/event-stream"}
_ID = re.compile(rb"^id: 1-(\d+)$", re.MULTILINE)


async def _running(it: Running, *values: Any) -> Delivery:
    """Publish the task ``t1``, deliver it, and append events."""
    await it.publish("t1", key="a")
    (delivery,) = (await it.backend.subscribe(["a"], "w").receive(1, 5)).deliveries
    await streams_of(it.backend).append(new(delivery, *values))
    return delivery


async def _ticket(client: httpx2.AsyncClient, **more: Any) -> str:
    answer = await client.post("/v1/tasks/a/t1/ticket", json={}, headers=bearer(OWNER), **more)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["ticket"])


def _tokens(folder: Path) -> Path:
    return write(
        folder / "tokens.toml",
        entry(OWNER, "owner", verbs=["publish"], keys=["a"]),
        entry(OBSERVER, "screen", verbs=["observe"]),
        entry(OTHER, "other", verbs=["publish"], keys=["b"]),
    )


async def test_rights(tmp_path: Path) -> None:
    """U19, U21: events and tickets need a right to read results; ``observe`` and other queues are refused."""
    async with running(tokens_file=_tokens(tmp_path)) as it, http(it) as client:
        await _running(it, 1)
        for method, path in (("GET", PATH), ("POST", "/v1/tasks/a/t1/ticket")):
            options: dict[str, Any] = {"json": {}} if method == "POST" else {}
            problem(await client.request(method, path, **options), 401, "unauthenticated")
            for token in (OBSERVER, OTHER):
                answer = await client.request(method, path, headers=bearer(token), **options)
                problem(answer, 403, "forbidden")
            answer = await client.request(method, path, headers=bearer(OWNER), **options)
            assert answer.status_code == 200, path
        for seconds in (0, 86_401):
            answer = await client.post(
                "/v1/tasks/a/t1/ticket", json={"seconds": seconds}, headers=bearer(OWNER)
            )
            problem(answer, 422, "invalid_input", "seconds")


async def test_a_ticket_reads_one_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """U19: a ticket permits to read the events of one task until it expires; all others are refused alike."""
    caplog.set_level(logging.DEBUG)
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    path = _tokens(tmp_path)
    origin = "https://app.example"
    options: dict[str, Any] = {"origins": frozenset({origin}), "server_ticket_key_file": key}
    async with running(tokens_file=path, **options) as it, http(it) as client:
        await _running(it, 1)
        ticket = await _ticket(client)
        answer = await client.get(PATH, params={"ticket": ticket}, headers={"origin": origin})
        assert [event["value"] for event in answer.json()["events"]] == [1, 1]
        assert answer.headers["access-control-allow-origin"] == origin
        with_token = await client.get(PATH, headers=bearer(OWNER) | {"origin": origin})
        assert "access-control-allow-origin" not in with_token.headers
        expires, _, signature = ticket.partition(".")
        now = it.context.backend.now()
        same_key = Tickets(key)
        assert same_key.issue("a", "t1", float(expires)) == ticket
        wrong = {
            "a later time": f"{int(expires) + 1}.{signature}",
            "another signature": f"{expires}.{'A' * 43}",
            "no signature": f"{expires}.",
            "empty": "",
            "too long": f"{expires}.{signature}" * 100,
            "no ticket": "é" * 54,
            "another task": same_key.issue("a", "t2", now + 60),
            "another queue": same_key.issue("b", "t1", now + 60),
            "expired": same_key.issue("a", "t1", now - 1),
            "another key": Tickets().issue("a", "t1", now + 60),
        }
        for what, text in wrong.items():
            answer = await client.get(PATH, params={"ticket": text}, headers=bearer(OWNER))
            problem(answer, 401, "bad_ticket")
            assert not text or text not in answer.text, what
        answer = await client.get("/v1/tasks/a/t1", params={"ticket": ticket})
        problem(answer, 401, "unauthenticated")
        answer = await client.post("/v1/tasks/a/t1/ticket", params={"ticket": ticket}, json={})
        problem(answer, 401, "unauthenticated")
    own = [record for record in caplog.records if record.name.startswith(("taskqueue", "uvicorn"))]
    assert any(record.getMessage() == "request" for record in own)
    assert signature not in repr([vars(record) for record in own])


def test_key_files(tmp_path: Path) -> None:
    """U19: a key file that is missing, or too small to be random, ends the start, and the error names the setting."""
    small = tmp_path / "small"
    small.write_bytes(b"k")
    for path, fault in ((tmp_path / "missing", "cannot be read"), (small, "has 1 byte; expected")):
        with pytest.raises(ConfigurationError, match=f"TASKQUEUE_SERVER_TICKET_KEY_FILE: {fault}"):
            Tickets(path)
    small.write_bytes(b"k" * 31)
    with pytest.raises(ConfigurationError, match="has 31 bytes"):
        Tickets(small)


async def test_many_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """U19: readers are limited for each process, and a ticket has half of them; each ends with its ticket."""
    monkeypatch.setattr(server_context, "_MOST_READERS", 2)
    asked = list[float]()

    def soon(seconds: float) -> AbstractContextManager[asyncio.Event]:
        asked.append(seconds)
        return expiring(0.05)

    async with running() as it, http(it) as client:
        await _running(it, 1)
        query = {"ticket": await _ticket(client)}
        async with client.stream("GET", PATH, params=query, headers=SSE) as first:
            assert first.status_code == 200
            problem(await client.get(PATH, params=query, headers=SSE), 429, "too_many_readers")
            async with client.stream("GET", PATH, headers=SSE) as second:
                assert second.status_code == 200
                problem(await client.get(PATH, headers=SSE), 503, "too_many_readers")
                waiting = await client.get(PATH, params={"after": "1-2", "wait": 1})
                problem(waiting, 503, "too_many_readers")
                assert (await client.get(PATH)).status_code == 200
        await eventually(lambda: not len(it.context.readers))
        monkeypatch.setattr(operations, "expiring", soon)
        ended = await client.get(PATH, params=query, headers=SSE)
        assert _ID.findall(ended.content) == [b"1", b"2"]
        assert 595 < asked[0] <= 601


async def test_a_task_that_streams_nothing() -> None:
    """U19: a client that reads such a task gets its end at once, and nothing after it; so does a page."""
    async with running() as it, http(it) as client:
        await it.publish("t1", key="a")
        async with client.stream("GET", PATH, params={"channels": "log"}, headers=SSE) as answer:
            await eventually(lambda: len(it.context.readers))
            await control_of(it.backend).cancel("a", "t1")
            text = (await answer.aread()).decode()
        assert text.startswith("id: 0-1\nevent: end\n")
        assert '"value":"cancelled"' in text
        last = await client.get(PATH, headers=SSE | {"last-event-id": "0-1"})
        assert last.status_code == 204
        page = (await client.get(PATH)).json()
        assert [event["kind"] for event in page["events"]] == ["end"]
        assert (page["next"], page["ended"]) == ("0-1", True)


async def test_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """U19: a client that does not read is disconnected; with its last id it comes again, and gets each event once.

    Until then, at most two chunks wait for it in the server, however much it has not read.
    """
    monkeypatch.setattr(event_stream, "_READS", 0.05)
    held = list[int]()
    async with running() as it, http(it) as client:
        wide = QueueSettings(stream_bytes=64 * 1024 * 1024)
        await it.context.control.configure("a", wide)
        delivery = await _running(it)
        large = b'"' + b"x" * 60_000 + b'"'
        for first in range(1, 121, 10):
            await streams_of(it.backend).append(new(delivery, *[large] * 10, first=first))
        await it.backend.subscribe(["a"], "w").ack(delivery)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)  # noqa: FBT003 - an argument by position
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", it.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        writer.write(
            f"GET {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/event-stream\r\n\r\n".encode()
        )
        await eventually(lambda: len(it.context.readers))
        assert it.server._uvicorn is not None
        connections = it.server._uvicorn.server_state.connections

        def disconnected() -> bool:
            held.extend(each.transport.get_write_buffer_size() for each in connections)
            return not len(it.context.readers)

        await eventually(disconnected)
        got = b"".join([part async for part in _parts(reader)])
        writer.close()
        blocks = got.split(b"\n\n")[:-1]  # the last one is not whole
        seen = [int(number) for number in _ID.findall(b"\n\n".join(blocks))]
        assert 0 < len(seen) < 121
        assert 0 < max(held) < 3 * api._CHUNK
        last = {"last-event-id": f"1-{seen[-1]}"}
        rest = await client.get(PATH, headers=SSE | last, params={"after": "1-1"})
        seen += [int(number) for number in _ID.findall(rest.content)]
        assert seen == list(range(1, 123))


async def test_a_reader_that_leaves() -> None:
    """U19: the events of a response are closed with it, so that nothing of it is left when a write has failed."""
    closed = list[bool]()

    async def chunks() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b": no events\n\n"
        finally:
            closed.append(True)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise OSError

    async def receive() -> Message:
        return await wait_forever()

    response = event_stream.EventStream(nullcontext(), chunks())
    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    assert closed == [True]


async def _parts(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield what a connection still has until its end."""
    try:
        while part := await reader.read(65536):
            yield part
    except ConnectionError:
        pass
