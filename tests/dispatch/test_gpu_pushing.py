"""Tests of the results that a GPU server pushes to dispatchers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from taskqueue_dispatch.endpoint_client.answers import Done, JobAcceptedAnswer
from taskqueue_dispatch.gpu_server import push
from taskqueue_dispatch.gpu_server.component import GpuServer
from taskqueue_dispatch.gpu_server.jobs import GpuJob, JobFailed
from taskqueue_dispatch.gpu_server.push import Pusher
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from tests.dispatch.gpu_support import (
    ASYNC,
    SYNC,
    Trap,
    calling,
    lease_of,
    response,
    served,
    task_of,
    trap,
)
from tests.dispatch.patience import PATIENCE, until


def pushed(server: Trap) -> list[tuple[bytes, bytes, dict[str, object]]]:
    """Return the request line, the lease token and the body of each push."""
    found = []
    for request in server.requests:
        head, _, body = request.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        (token,) = [line for line in lines if line.lower().startswith(b"x-lease-token: ")]
        found.append((lines[0], token[15:], msgspec.json.decode(body)))
    return found


class Waits:
    """A sleep function that returns at once and records the requested times."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def __call__(self, seconds: float) -> None:
        """Record the requested time."""
        self.asked.append(seconds)


async def test_a_result() -> None:
    """An asynchronous server with a dispatcher's URL pushes the result there, with the slot's token (C7)."""
    async with trap(response(200, b"{}")) as dispatcher:
        gpu = SimulatedGpu(latency=0, asynchronous=True, dispatcher=dispatcher.origin + "/")
        async with gpu, calling() as caller:
            sent = await caller.send(lease_of(gpu.url), task_of(), ASYNC, attempt=2)
            assert sent == JobAcceptedAnswer("job-1")
            await until(lambda: bool(dispatcher.requests))
            assert pushed(dispatcher) == [
                (
                    b"POST /tasks/callback/job-1 HTTP/1.1",
                    b"token-1",
                    {
                        "status": "success",
                        "job_id": "job-1",
                        "result": {"server": "gpu", "job_id": "job-1", "attempt": 2},
                    },
                )
            ]
            assert gpu.active == 0, "the slot was free before the push"
            assert isinstance(await caller.ask(gpu.url, "job-1", SYNC), Done)


async def test_a_failure() -> None:
    """A failure is pushed like a result (C7)."""

    async def handler(_: GpuJob) -> None:
        raise JobFailed("out of memory")

    async with trap(response(200, b"{}")) as dispatcher:
        app = GpuServer(handler, asynchronous=True, dispatcher=dispatcher.origin)
        async with served(app) as origin, calling() as caller:
            await caller.send(lease_of(origin), task_of(), ASYNC, attempt=1)
            await until(lambda: bool(dispatcher.requests))
            _, _, told = pushed(dispatcher)[0]
            assert (told["status"], told["error"]) == ("failed", "out of memory")


async def test_what_is_not_pushed() -> None:
    """A synchronous answer, a direct caller's job, and a job without a token are not pushed (C7)."""
    async with trap(response(200, b"{}")) as dispatcher:
        async with (
            SimulatedGpu(latency=0, dispatcher=dispatcher.origin) as sync,
            calling() as caller,
        ):
            await caller.send(lease_of(sync.url), task_of(), SYNC, attempt=1)
        async with (
            SimulatedGpu(latency=0, asynchronous=True, dispatcher=dispatcher.origin) as gpu,
            calling() as caller,
        ):
            request = (
                b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 1\r\n%s\r\n0"
            )
            for lines in (b"", b"x-source: dispatcher\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", gpu.port)
                writer.write(request % lines)
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
                writer.close()
                await until(lambda: gpu.active == 0)
            await caller.send(lease_of(gpu.url), task_of("last"), ASYNC, attempt=1)
            await until(lambda: bool(dispatcher.requests))
        assert [told["job_id"] for _, _, told in pushed(dispatcher)] == ["last"]


async def test_the_token_of_the_one_that_asks_now() -> None:
    """If another dispatcher has taken over a job, the push uses the new dispatcher's token (C7, fault H2)."""
    go = asyncio.Event()

    async def handler(_: GpuJob) -> int:
        await go.wait()
        return 1

    async with trap(response(200, b"{}")) as dispatcher:
        app = GpuServer(handler, asynchronous=True, dispatcher=dispatcher.origin)
        async with served(app) as origin, calling() as caller:
            for token in ("token-1", "token-2"):
                lease = msgspec.structs.replace(lease_of(origin), token=token)
                sent = await caller.send(lease, task_of(), ASYNC, attempt=1)
                assert sent == JobAcceptedAnswer("job-1")
            go.set()
            await until(lambda: bool(dispatcher.requests))
            assert [token for _, token, _ in pushed(dispatcher)] == [b"token-2"]


class TestAgain:
    """Pushes that the dispatcher does not accept, or that hang."""

    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 302])
    async def test_later(self, status: int) -> None:
        """A failed push is repeated with growing pauses and then given up; the job can be polled (C7)."""
        waits = Waits()
        async with trap(response(status, b"{}", "location: /elsewhere")) as dispatcher:
            pusher = Pusher(dispatcher.origin, sleep=waits)
            pusher.push("job-1", "t", b"{}")
            await until(lambda: not pusher._tasks)
            await pusher.aclose()
            assert len(dispatcher.requests) == 6
            assert waits.asked == [0.5, 1.0, 2.0, 4.0, 8.0]
            assert {line for line, _, _ in pushed(dispatcher)} == {
                b"POST /tasks/callback/job-1 HTTP/1.1"
            }

    @pytest.mark.parametrize("status", [200, 401, 404, 409])
    async def test_once(self, status: int) -> None:
        """A push that was accepted, or refused for good, is not repeated (C7)."""
        async with trap(response(status, b"{}")) as dispatcher:
            pusher = Pusher(dispatcher.origin, sleep=Waits())
            pusher.push("job-1", "t", b"{}")
            await until(lambda: not pusher._tasks)
            await pusher.aclose()
            assert len(dispatcher.requests) == 1

    async def test_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pushes that hang are limited in number, and do not delay the end of the server (C7)."""
        monkeypatch.setattr(push, "_AT_ONCE", 5)

        async def hangs(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
            await asyncio.get_running_loop().create_future()

        async with trap(hangs) as dispatcher:
            pusher = Pusher(dispatcher.origin)
            for n in range(20):
                pusher.push(f"j{n}", "t", b"{}")
            await until(lambda: dispatcher.connections == 5)
            assert len(pusher._tasks) == 5
            async with asyncio.timeout(PATIENCE):
                await pusher.aclose()
