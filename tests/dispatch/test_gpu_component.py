"""Tests of the GPU server component on a real port: which calls get a slot, and which answers they get."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from taskqueue_core.limits import LIMITS
from taskqueue_dispatch.endpoint_client.answers import (
    Busy,
    Done,
    JobAcceptedAnswer,
    JobFailedAnswer,
    JobRunningAnswer,
    Missing,
)
from taskqueue_dispatch.gpu_server.jobs import GpuJob
from tests.dispatch.gpu_model import serving
from tests.dispatch.gpu_support import (
    ASYNC,
    lease_of,
    task_of,
)
from tests.dispatch.patience import PATIENCE, until


class TestClasses:
    """Calls of dispatchers, and direct calls."""

    async def test_a_dispatcher_is_refused_while_it_is_busy(self) -> None:
        """Once all slots are in use, a dispatcher gets 503 with Retry-After, and the job is not kept (C2)."""
        async with serving(max_concurrent=2, retry_after=3) as it:
            first, second = asyncio.create_task(it.send("a")), asyncio.create_task(it.send("b"))
            await until(lambda: len(it.model.running) == 2)
            assert await it.send("c") == Busy(3.0)
            assert await it.status("c") == Missing()
            it.model.end(1)
            await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
            third = asyncio.create_task(it.send("c"))
            await until(lambda: "c" in it.model.running)
            it.model.end(2)
            assert all(
                isinstance(told, Done) for told in await asyncio.gather(first, second, third)
            )
            assert it.model.most == 2

    async def test_direct_calls_wait_and_go_first(self) -> None:
        """Up to ten direct calls wait in a queue, know their position, and run before any dispatcher's job (C2)."""
        async with serving() as it:
            running = asyncio.create_task(it.send("d-1"))
            await until(lambda: it.model.running == {"d-1"})
            for place in range(1, 11):
                answer = await it.direct(f"direct-{place}")
                assert answer.status_code == 200
                assert answer.json() == {
                    "status": "queued",
                    "job_id": f"direct-{place}",
                    "position": place,
                }
            full = await it.direct("direct-11")
            assert (full.status_code, full.json()) == (503, {"detail": "Queue full"})
            assert full.headers["retry-after"] == "1"
            order = it.model.order
            for begun in range(2, 12):
                it.model.end()
                await until(partial(lambda number: len(order) == number, begun))
                assert isinstance(await it.send("d-2"), Busy), "direct calls are running or waiting"
            assert isinstance(await running, Done)
            it.model.end()
            await until(lambda: not it.model.running)
            it.model.end()
            assert isinstance(await it.send("d-2"), Done)
            assert it.model.order == ["d-1", *(f"direct-{n}" for n in range(1, 11)), "d-2"]

    async def test_a_free_slot_with_direct_calls_before_it(self) -> None:
        """A dispatcher is refused while direct calls are waiting, not only while all slots are in use (C2)."""
        async with serving(max_concurrent=2) as it:
            jobs = it.model
            for n in range(3):
                await it.direct(f"direct-{n}")
            assert isinstance(await it.send(), Busy)
            jobs.end()
            await until(lambda: jobs.order == ["direct-0", "direct-1", "direct-2"])
            assert isinstance(await it.send(), Busy)
            jobs.end()
            await until(lambda: len(jobs.running) == 1)
            jobs.end(2)
            assert isinstance(await it.send(), Done)

    async def test_direct_at_once(self) -> None:
        """A direct call to an idle server runs at once, and the caller polls for the result (C2)."""
        async with serving() as it:
            answer = (await it.direct()).json()
            assert (answer["status"], answer["position"]) == ("queued", 0)
            status = it.origin + "/status/" + answer["job_id"]
            assert (await it.client.get(status)).json()["status"] == "processing"
            it.model.end()
            await until(lambda: not it.model.running)
            told = (await it.client.get(status)).json()
            assert told["status"] == "success"
            assert told["result"]["job"] == answer["job_id"]

    async def test_no_direct_queue(self) -> None:
        """With ``direct_queue=0``, a direct call is refused unless a slot is free (C2)."""
        async with serving(direct_queue=0) as it:
            assert (await it.direct("a")).status_code == 200
            assert (await it.direct("b")).status_code == 503
            it.model.end()


class TestAnswers:
    """Answers to a dispatcher."""

    async def test_sync(self) -> None:
        """A synchronous server answers with the result (C3)."""
        async with serving() as it:
            it.model.end()
            assert await it.send(attempt=4) == Done(b'{"job":"job-1","attempt":4}')

    async def test_async(self) -> None:
        """An asynchronous server answers with an id, and is polled for the result (C3, C4)."""
        async with serving(asynchronous=True) as it:
            sent = await it.caller.send(lease_of(it.url), task_of(), ASYNC, attempt=1)
            assert sent == JobAcceptedAnswer("job-1")
            assert await it.status("job-1") == JobRunningAnswer()
            it.model.end()
            await until(lambda: not it.model.running)
            assert await it.status("job-1") == Done(b'{"job":"job-1","attempt":1}')
            assert await it.status("job-2") == Missing()

    @pytest.mark.parametrize(
        ("payload", "answer", "status"),
        [
            ("fail", JobFailedAnswer("HTTP 500: out of memory"), JobFailedAnswer("out of memory")),
            (
                "refuse",
                JobFailedAnswer("HTTP 422: no prompt", final=True),
                JobFailedAnswer("no prompt", final=True),
            ),
            (
                "break",
                JobFailedAnswer("HTTP 500: the model has failed (ValueError)"),
                JobFailedAnswer("the model has failed (ValueError)"),
            ),
        ],
    )
    async def test_failures(
        self, payload: str, answer: JobFailedAnswer, status: JobFailedAnswer
    ) -> None:
        """A handler chooses the error text of a failed job; of any other exception only the type is shown (C3, C4)."""
        async with serving() as it:
            it.model.end(1)
            assert await it.send(payload=payload) == answer
            assert await it.status("job-1") == status

    async def test_progress(self) -> None:
        """The progress that a handler sets is returned to a poll (C4)."""
        go = asyncio.Event()

        async def handler(job: GpuJob) -> None:
            job.progress = 0.25
            await go.wait()

        async with serving(handler, asynchronous=True) as it:
            await it.caller.send(lease_of(it.url), task_of(), ASYNC, attempt=1)
            assert await it.status("job-1") == JobRunningAnswer(0.25)
            go.set()

    async def test_plain_functions(self) -> None:
        """A plain function as handler runs in a thread per slot, and the server stays responsive (C2, C22)."""
        go, together = threading.Event(), threading.Semaphore(0)

        def handler(job: GpuJob) -> str:
            together.release()
            go.wait(PATIENCE)
            return job.id

        async with serving(handler, max_concurrent=40) as it:
            calls = [asyncio.create_task(it.send(f"j{n}")) for n in range(40)]
            for _ in range(40):
                await asyncio.to_thread(together.acquire, timeout=PATIENCE)
            assert (await it.health())["active_jobs"] == 40
            go.set()
            assert {told.result for told in await asyncio.gather(*calls)} == {
                f'"j{n}"'.encode() for n in range(40)
            }

    @pytest.mark.parametrize("result", [float("nan"), b"bytes", "x" * LIMITS.payload, object()])
    async def test_results_that_cannot_be_encoded(self, result: object) -> None:
        """A result that is too large or not JSON fails the job with an error about the result (fault H5)."""

        async def handler(_: GpuJob) -> object:
            return result

        async with serving(handler) as it:
            told = await it.send()
            assert isinstance(told, JobFailedAnswer)
            assert "result" in told.error
