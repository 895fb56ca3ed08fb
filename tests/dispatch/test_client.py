"""Tests of the client function that submits a job until the server confirms it, whatever responses are lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from email.utils import formatdate
from typing import Any

import httpx2
import msgspec
import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of
from taskqueue_core.errors import InvalidInput, PublishUnconfirmed
from taskqueue_dispatch.client import (
    Confirmed,
    SubmitRefused,
    submit_until_confirmed,
    submit_until_confirmed_sync,
)
from taskqueue_dispatch.jobs import Submission
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.submit import Estimates, NoSlots, Submitter
from tests.dispatch.desk import URL, registry_of, well
from tests.dispatch.fronts import CUT, Flaky, Reply, reply
from tests.dispatch.patience import PATIENCE

JOB = {"model": "flux", "payload": {"prompt": "a sunset"}}


class Sleeps:
    """A replacement for ``sleep`` and the clock; it records each pause and advances the time by it."""

    def __init__(self) -> None:
        """Start at time 0."""
        self.slept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        """Record the pause, without waiting."""
        self.slept.append(seconds)

    def now(self) -> float:
        """Return the sum of all pauses."""
        return sum(self.slept)


async def desk(backend: Backend, room: int = 100_000) -> Submitter:
    """Return a submitter whose queue accepts up to ``room`` jobs."""
    registry = await registry_of(backend)
    config = ModelConfig(queue_per_slot=room, queue_limit=room)
    await registry.configure("flux", config)
    await registry.register("flux", "a", URL, 1)
    await well(backend, "flux", "a")
    return Submitter(backend, registry, Estimates())


def answering(submitter: Submitter) -> Any:
    """Return a function that handles a submit request as a server does."""

    async def answer(body: bytes) -> Reply:
        told = json.loads(body)
        payload = msgspec.json.encode(told.pop("payload"))
        outcome = await submitter.submit(Submission(payload=payload, **told))
        if isinstance(outcome, NoSlots):
            return reply(503, b"{}", "retry-after: 0")
        return reply(200, msgspec.json.encode({"job_id": outcome.job_id}))

    return answer


async def test_the_same_through_threads(backend: Backend) -> None:
    """The synchronous client, used in a thread, confirms each job and stores it once (OPEN-C1)."""
    answer = answering(await desk(backend))
    async with Flaky(answer, refused=0.3, cut=0.2, seed=1) as front:

        def some() -> list[Confirmed]:
            with httpx2.Client(trust_env=False, verify=False) as client:
                return [
                    submit_until_confirmed_sync(client, front.url, JOB, sleep=lambda _: None)
                    for _ in range(50)
                ]

        told = await asyncio.to_thread(some)
        assert front.count["refused"] > 5
        assert front.count["cut"] > 5
    assert len({one.answer["job_id"] for one in told}) == 50
    assert (await control_of(backend).ledger(queue_of("flux"))).published == 50


async def test_back_pressure_is_waited_out(backend: Backend) -> None:
    """While the queue is full, the client tries again; no job is lost or stored twice (B13, OPEN-C1)."""
    submitter = await desk(backend, room=2)
    async with (
        Flaky(answering(submitter)) as front,
        httpx2.AsyncClient(trust_env=False, verify=False) as client,
    ):
        for _ in range(2):
            await submit_until_confirmed(client, front.url, JOB)
        tries = 0

        async def sleep(_: float) -> None:
            nonlocal tries
            tries += 1
            if tries == 3:
                await control_of(backend).purge(queue_of("flux"))

        told = await submit_until_confirmed(client, front.url, JOB, sleep=sleep)
        assert told.tries == 4
    ledger = await control_of(backend).ledger(queue_of("flux"))
    assert (ledger.published, ledger.waiting, ledger.cancelled) == (3, 1, 2)


@pytest.mark.parametrize(
    "lost",
    [
        CUT,
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\nx-cut: 1\r\n\r\n{",
        b"no HTTP at all\r\n\r\nx-cut",
        reply(200, b"<html>"),
        reply(200, b"[]"),
        reply(200, b"\xff"),
        reply(200, b'"' + b"x" * 100_000 + b'"'),
        reply(200, b'{"job_id":' + b"[" * 60_000),
        *(reply(status, b"busy") for status in (408, 425, 429, 500, 502, 503, 504)),
        reply(502, b"zzz", "content-encoding: gzip"),
    ],
)
async def test_what_is_tried_again(lost: Reply) -> None:
    """If the response leaves open whether the job was stored, the client repeats the request (OPEN-C1)."""
    sleeps = Sleeps()
    async with (
        Flaky(answer, script=[lost, lost]) as front,
        httpx2.AsyncClient(trust_env=False, verify=False) as client,
    ):
        told = await submit_until_confirmed(client, front.url, JOB, sleep=sleeps)
        assert (told.tries, told.answer) == (3, {"job_id": "x"})
        assert len(front.bodies) == 3
        assert len(set(front.bodies)) == 1
        assert json.loads(front.bodies[0]) == JOB | {"idempotency_key": told.idempotency_key}


async def answer(_: bytes) -> Reply:
    """Confirm any job."""
    return reply(200, b'{"job_id":"x"}')


@pytest.mark.parametrize("status", [300, 302, 400, 401, 403, 404, 409, 413, 415, 422, 501])
async def test_what_is_final(status: int) -> None:
    """A response that will not change raises `SubmitRefused` at once, with the server's explanation (OPEN-C1)."""
    problem = b'{"title":"Bad","detail":"model: got nothing"}'
    final = reply(status, problem, "location: http://169.254.169.254/")
    async with (
        Flaky(answer, script=[final]) as front,
        httpx2.AsyncClient(trust_env=False, verify=False) as client,
    ):
        with pytest.raises(SubmitRefused, match="got nothing") as caught:
            await submit_until_confirmed(client, front.url, JOB, sleep=Sleeps())
        assert caught.value.status == status
        assert front.count["requests"] == 1


async def test_a_silent_server() -> None:
    """If the server does not answer, the client tries again, and then raises `PublishUnconfirmed` (OPEN-C1)."""
    async with httpx2.AsyncClient(trust_env=False, verify=False) as client:
        async with Flaky(answer) as front:
            pass
        with pytest.raises(PublishUnconfirmed) as caught:
            await submit_until_confirmed(client, front.url, JOB, attempts=3, sleep=Sleeps())
        assert "(tries: 3)" in str(caught.value)
        hanging = asyncio.Event()

        async def hang(_: bytes) -> Reply:
            await hanging.wait()
            return reply(200)

        async with (
            Flaky(hang) as front,
            httpx2.AsyncClient(trust_env=False, verify=False, timeout=None) as patient,
            asyncio.timeout(PATIENCE),
        ):
            with pytest.raises(PublishUnconfirmed):
                await submit_until_confirmed(patient, front.url, JOB, attempts=1, deadline=0.2)


async def test_a_server_that_drips() -> None:
    """A try of the synchronous client ends at its deadline, even if the response keeps arriving slowly (OPEN-C1)."""
    to_the_end: list[bool] = []
    drops = reply(200, b"")[:-4].replace(b"length: 0", b"length: 60000") + b"\r\n\r\n"

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(drops)
        with contextlib.suppress(OSError):
            for _ in range(3000):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
            to_the_end.append(True)
        writer.close()

    def submitted(url: str) -> None:
        with httpx2.Client(trust_env=False, verify=False) as client:
            submit_until_confirmed_sync(client, url, JOB, attempts=1, deadline=0.3)

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PublishUnconfirmed):
            await asyncio.to_thread(submitted, f"http://127.0.0.1:{port}/")
        assert not to_the_end


async def test_it_ends_in_time() -> None:
    """Tries and time are limited; with the idempotency key in the error the caller can continue (OPEN-C1)."""
    sleeps = Sleeps()
    async with (
        Flaky(answer, script=[reply(502)] * 100) as front,
        httpx2.AsyncClient(trust_env=False, verify=False) as client,
    ):
        with pytest.raises(PublishUnconfirmed) as caught:
            await submit_until_confirmed(
                client, front.url, JOB, deadline=60, sleep=sleeps, clock=sleeps.now
            )
        assert 40 < sum(sleeps.slept) < 60
        key = caught.value.task_id
        assert key is not None
        with pytest.raises(PublishUnconfirmed):
            await submit_until_confirmed(
                client, front.url, JOB | {"idempotency_key": key}, attempts=5, sleep=sleeps
            )
        assert len(set(front.bodies)) == 1


async def test_pauses() -> None:
    """The pauses grow, and are at least the Retry-After time, which is limited to a minute (OPEN-C1)."""
    script = [
        reply(502),
        reply(502),
        reply(502),
        reply(503, b"{}", "retry-after: 7"),
        reply(503, b"{}", "retry-after: 100000"),
        reply(503, b"{}", "retry-after: soon"),
        reply(503, b"{}", "retry-after: nan"),
        reply(503, b"{}", "retry-after: Mon, 01 Jan 99999999999999999999 00:00:00 GMT"),
        reply(503, b"{}", "retry-after: Wed, 21 Oct 2015 07:28:00 +99999999999999999999"),
        reply(503, b"{}", f"retry-after: {formatdate(0, usegmt=True)}"),
    ]
    sleeps = Sleeps()
    async with (
        Flaky(answer, script=script) as front,
        httpx2.AsyncClient(trust_env=False, verify=False) as client,
    ):
        await submit_until_confirmed(
            client, front.url, JOB, deadline=1e6, sleep=sleeps, uniform=lambda: 0.5
        )
    first, second, third, seconds, longest, *others = sleeps.slept
    assert [first, second, third] == pytest.approx([0.1, 0.2, 0.4])
    assert (seconds, longest) == (7 * 1.25, 60 * 1.25)
    assert all(pause <= 13 for pause in others)


@pytest.mark.parametrize(
    ("field", "job"),
    [
        ("idempotency_key", {"idempotency_key": "two words"}),
        ("idempotency_key", {"idempotency_key": 7}),
        ("submission", {"payload": float("nan")}),
        ("submission", {"payload": b"bytes"}),
    ],
)
async def test_what_no_server_would_take(field: str, job: dict[str, object]) -> None:
    """An invalid key, or a payload that is not JSON, is refused before anything is sent (OPEN-C1)."""
    async with Flaky(answer) as front, httpx2.AsyncClient(trust_env=False, verify=False) as client:
        with pytest.raises(InvalidInput) as caught:
            await submit_until_confirmed(client, front.url, JOB | job)
        assert caught.value.field == field
        with pytest.raises(InvalidInput):
            await submit_until_confirmed(client, front.url, JOB, attempts=0)
        with pytest.raises(httpx2.UnsupportedProtocol):
            await submit_until_confirmed(client, "ftp://127.0.0.1/", JOB)
        assert not front.bodies


async def test_cancelled() -> None:
    """A cancelled client stops trying (OPEN-C1)."""
    async with (
        Flaky(answer, script=[reply(502)] * 10) as front,
        httpx2.AsyncClient(trust_env=False, verify=False) as client,
    ):
        waiting = asyncio.Event()

        async def sleep(_: float) -> None:
            waiting.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(submit_until_confirmed(client, front.url, JOB, sleep=sleep))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert front.count["requests"] == 1
