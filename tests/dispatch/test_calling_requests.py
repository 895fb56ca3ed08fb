"""Tests of the requests that GPU servers receive, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest

from taskqueue_core.tasks import Task
from taskqueue_dispatch.endpoint_client.answers import Done, EndpointUnreachable, JobAcceptedAnswer
from taskqueue_dispatch.models import ModelConfig
from tests.dispatch.gpu_support import (
    ASYNC,
    SYNC,
    calling,
    endpoint_of,
    lease_of,
    said,
    task_of,
    trap,
)
from tests.dispatch.patience import PATIENCE

DONE = said(status="success", result=1)


def parts(request: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Return the request line, the headers by lower-case name, and the body; no header may occur twice."""
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b": ")
        assert name.lower() not in headers
        headers[name.lower()] = value
    return first, headers, body


class TestJobs:
    """The POST request that sends a job."""

    async def test_headers_and_body(self) -> None:
        """The headers name sender, job, attempt and slot token, and the payload is unchanged (C2, C3, C7)."""
        payload = b'{ "prompt" : "\xc3\xa9", "n":1.50 }'
        task = Task(key="dispatch:flux", id="job-1", payload=payload)
        async with trap(DONE) as server, calling() as caller:
            assert await caller.send(lease_of(server.url), task, SYNC, attempt=3) == Done(b"1")
            first, headers, body = parts(server.requests[0])
        assert first == b"POST /generate HTTP/1.1"
        assert body == payload
        assert headers == {
            b"host": server.origin.removeprefix("http://").encode(),
            b"accept": b"application/json",
            b"accept-encoding": b"identity",
            b"user-agent": b"taskqueue-dispatch",
            b"content-type": b"application/json",
            b"content-length": str(len(payload)).encode(),
            b"x-source": b"dispatcher",
            b"idempotency-key": b"job-1",
            b"x-job-id": b"job-1",
            b"x-attempt": b"3",
            b"x-lease-token": b"token-1",
        }

    async def test_no_callback_address(self) -> None:
        """A GPU server sees neither the client's callback URL nor any other header of the job (C7)."""
        task = Task.of(
            "dispatch:flux",
            {"prompt": "x"},
            tenant="tenant-canary",
            headers={"callback-url": "https://client.example/canary", "model": "canary"},
        )
        async with trap(DONE) as server, calling() as caller:
            await caller.send(lease_of(server.url), task, SYNC, attempt=1)
            await caller.ask(server.url, task.id, SYNC)
            await caller.health(endpoint_of(server.url), SYNC)
            assert len(server.requests) == 3
            assert b"canary" not in b"".join(server.requests)

    async def test_path_and_query(self) -> None:
        """A job is sent to the endpoint's URL with its query; polls and health checks use its origin (C4, C5)."""
        config = ModelConfig(poll_endpoint_template="/v1/of/{id}/now?x=1", health_path="/v1/ok")
        async with trap(DONE) as server, calling() as caller:
            url = server.origin + "/a/b%20c?key=v"
            await caller.send(lease_of(url), task_of(), config, attempt=1)
            await caller.ask(url, "r-1", config)
            await caller.health(endpoint_of(url), config)
            assert [parts(request)[0] for request in server.requests] == [
                b"POST /a/b%20c?key=v HTTP/1.1",
                b"GET /v1/of/r-1/now?x=1 HTTP/1.1",
                b"GET /v1/ok HTTP/1.1",
            ]

    @pytest.mark.parametrize(
        ("remote", "path"),
        [
            ("a/../b", b"/status/a%2F..%2Fb"),
            ("?x#y", b"/status/%3Fx%23y"),
            ("a b", b"/status/a%20b"),
            ("é", b"/status/%C3%A9"),
            ("%2e%2e", b"/status/%252e%252e"),
            ("{id}", b"/status/%7Bid%7D"),
        ],
    )
    async def test_ids_of_servers(self, remote: str, path: bytes) -> None:
        """A job id chosen by the server is encoded as one path segment, whatever it contains (C5, fault H5)."""
        async with trap(said(status="processing", job_id=remote)) as server, calling() as caller:
            sent = await caller.send(lease_of(server.url), task_of(), ASYNC, attempt=1)
            assert sent == JobAcceptedAnswer(remote)
            await caller.ask(server.url, remote, ASYNC)
            assert parts(server.requests[1])[0] == b"GET " + path + b" HTTP/1.1"


class TestConnections:
    """How connections are reused."""

    async def test_one_after_another(self) -> None:
        """Sequential calls use one connection (C19)."""
        async with trap(DONE) as server, calling() as caller:
            for _ in range(20):
                await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
                await caller.ask(server.url, "job-1", SYNC)
            assert server.connections == 1

    async def test_many_at_once(self) -> None:
        """No call waits for a connection that another call uses (C1)."""
        release = asyncio.Event()
        together = 150

        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(server.requests) == together:
                release.set()
            await release.wait()
            writer.write(DONE)

        async with trap(talk) as server, calling() as caller:
            async with asyncio.timeout(PATIENCE):
                answers = await asyncio.gather(
                    *(
                        caller.send(lease_of(server.url), task_of(f"j{n}"), SYNC, attempt=1)
                        for n in range(together)
                    )
                )
            assert set(answers) == {Done(b"1")}

    async def test_closed_by_the_server(self) -> None:
        """A kept connection that the server has closed is not used for the next job (fault H5)."""
        gone = asyncio.Event()

        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(DONE)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            gone.set()

        async with trap(talk) as server, calling() as caller:
            for _ in range(5):
                gone.clear()
                sent = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
                assert sent == Done(b"1")
                await gone.wait()
            assert server.connections == 5

    async def test_two_answers_to_one_request(self) -> None:
        """Data after a complete response is never taken for the next response.

        The next call fails as if the job was sent, and the connection is closed (fault H5).
        """
        async with (
            trap(DONE + said(status="success", result="evil")) as server,
            calling() as caller,
        ):
            for number in range(3):
                for expected in (
                    Done(b"1"),
                    EndpointUnreachable(
                        "the server responded before the request was sent", sent=True
                    ),
                ):
                    sent = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
                    assert sent == expected
                assert server.connections == number + 1

    async def test_an_answer_to_nothing(self) -> None:
        """Data that arrives on an idle connection is never taken for the next response (fault H5)."""
        idle, told, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(DONE)
            await writer.drain()
            if server.connections == 1:
                await idle.wait()
                writer.write(said(status="success", result="evil"))
                told.set()
                with contextlib.suppress(ConnectionError):
                    assert not await reader.read()
                gone.set()

        async with trap(talk) as server, calling() as caller, asyncio.timeout(PATIENCE):
            sent = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
            assert sent == Done(b"1")
            idle.set()
            await told.wait()
            sent = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
            assert sent == Done(b"1")
            await gone.wait()
            assert server.connections == 2

    async def test_cancelled(self) -> None:
        """A cancelled call closes its connection, and the next call uses a new one (fault H2)."""
        began, ended = asyncio.Event(), asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if began.is_set():
                writer.write(DONE)
                return
            began.set()
            await reader.read()
            ended.set()

        async with trap(talk) as server, calling() as caller:
            call = asyncio.create_task(
                caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
            )
            await began.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            async with asyncio.timeout(PATIENCE):
                await ended.wait()
            assert await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1) == Done(b"1")


async def test_the_environment_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Proxies and .netrc credentials of the environment are not used (C7)."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login canary password canary", encoding="ascii")
    monkeypatch.setenv("NETRC", str(netrc))
    async with trap(DONE) as proxy, trap(DONE) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.origin)
        async with calling() as caller:
            sent = await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)
            assert sent == Done(b"1")
        assert not proxy.connections
        assert b"authorization" not in server.requests[0].lower()


async def test_logs_show_no_address(caplog: pytest.LogCaptureFixture) -> None:
    """Log messages at INFO or above contain no URL, because a URL may contain a key (C7)."""
    caplog.set_level(logging.INFO)
    async with trap(DONE) as server, calling() as caller:
        await caller.send(lease_of(server.url + "?key=canary"), task_of(), SYNC, attempt=1)
    assert "canary" not in caplog.text
