"""Tests of the GPU server component: repeated jobs, health reports, and invalid requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.endpoint_client.answers import Done, JobFailedAnswer, Missing
from taskqueue_dispatch.gpu_server import component, jobs
from taskqueue_dispatch.gpu_server.component import GpuServer
from taskqueue_dispatch.gpu_server.jobs import GpuJob
from tests.dispatch.gpu_model import Model, serving
from tests.dispatch.gpu_support import (
    SYNC,
    calling,
    endpoint_of,
    lease_of,
    served,
    task_of,
)
from tests.dispatch.patience import until

DISPATCHER = {"X-Source": "dispatcher"}


class TestCancelling:
    """Jobs that a dispatcher cancels."""

    async def test_running(self) -> None:
        """A running job is cancelled, its slot is free, and a further attempt runs (U26, C23)."""
        async with serving() as it:
            call = asyncio.create_task(it.send())
            await until(lambda: it.model.running == {"job-1"})
            answer = await it.client.delete(it.origin + "/status/job-1")
            assert answer.status_code == 200
            assert await call == JobFailedAnswer("HTTP 500: cancelled")
            assert (await it.health())["jobs"] == []
            again = await it.client.delete(it.origin + "/status/job-1")
            assert again.json() == {
                "status": "failed", "job_id": "job-1", "error": "cancelled", "final": False
            }  # fmt: skip
            it.model.end()
            assert isinstance(await it.send(attempt=2), Done)

    async def test_before_it_began(self) -> None:
        """Jobs that have not begun are cancelled too; a handler in a thread is not (U26, C23)."""
        ended: list[str] = []

        async def handle(_: GpuJob) -> None:
            await asyncio.Event().wait()

        def make(handler: jobs.Handler) -> jobs.GpuJobs:
            return jobs.GpuJobs(
                handler,
                max_concurrent=1,
                direct_queue=1,
                keep_seconds=60,
                keep_count=10,
                on_end=lambda job: ended.append(job.id),
            )

        server = make(handle)
        first, second = (GpuJob(name, 1, attempt=1, direct=True) for name in "ab")
        server.add(first)
        server.add(second)
        assert server.cancel(second)
        assert server.cancel(first)
        assert not server.cancel(second)
        await first.ended.wait()
        assert (server.active, first.error, second.error) == ({}, "cancelled", "cancelled")
        assert server.find("b") is second
        threads = make(lambda job: job.id)
        threads.add(third := GpuJob("c", 1, attempt=1, direct=True))
        assert not threads.cancel(third)
        await third.ended.wait()
        assert third.result == b'"c"'
        await threads.aclose()


class TestOnce:
    """The same job, sent more than once."""

    async def test_while_it_runs(self) -> None:
        """A job that is sent again while it runs is not run twice; both callers get its result (C23, fault H2)."""
        async with serving() as it:
            first, again = asyncio.create_task(it.send()), asyncio.create_task(it.send())
            await until(lambda: it.model.running == {"job-1"})
            await it.status("job-1")
            it.model.end()
            assert await first == await again == Done(b'{"job":"job-1","attempt":1}')
            assert it.model.runs == {"job-1": 1}

    async def test_who_asked_has_gone(self) -> None:
        """A job whose dispatcher crashed continues, and the next dispatcher gets its result (C23, fault H2)."""
        async with serving() as it:
            call = asyncio.create_task(it.send())
            await until(lambda: it.model.running == {"job-1"})
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert (await it.health())["jobs"] == ["job-1"]
            it.model.end()
            assert isinstance(await it.send(attempt=2), Done)
            assert it.model.runs == {"job-1": 1}

    async def test_after_a_success(self) -> None:
        """A result is kept and returned again, even while the server is busy with other jobs (C23)."""
        async with serving() as it:
            it.model.end()
            done = await it.send()
            other = asyncio.create_task(it.send("job-2"))
            await until(lambda: it.model.running == {"job-2"})
            assert await it.send(attempt=7) == done
            it.model.end()
            await other

    async def test_after_a_failure(self) -> None:
        """A failed job that is sent again is run again, as a redriven job must be (C17, C23)."""
        async with serving() as it:
            it.model.end(2)
            assert isinstance(await it.send(payload="fail"), JobFailedAnswer)
            assert it.model.runs == {"job-1": 1}
            assert isinstance(await it.send(payload="fail"), JobFailedAnswer)
            assert it.model.runs == {"job-1": 2}

    async def test_another_payload(self) -> None:
        """The same key with another payload is refused, and the stored result stays (C23)."""
        async with serving() as it:
            it.model.end()
            done = await it.send(payload=1)
            told = await it.send(payload=2)
            assert isinstance(told, JobFailedAnswer)
            assert told.final
            assert await it.send(payload=1) == done

    async def test_large_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Results are kept up to a total size, the newest ones longest; payloads are not kept (fault H5)."""
        monkeypatch.setattr(jobs, "_MAX_STORED", 2500)

        async def handler(_: GpuJob) -> str:
            return "x" * 998

        async with serving(handler) as it:
            for n in (0, 1, 2, 3, 3):
                await it.send(f"j{n}")
            known = [not isinstance(await it.status(f"j{n}"), Missing) for n in range(4)]
            assert known == [False, False, True, True]

    async def test_memory_is_bounded(self) -> None:
        """Ended jobs are kept up to a number and for a time (fault H5)."""
        async with serving(keep_count=3, keep_seconds=10) as it:
            it.model.end(5)
            for n in range(5):
                await it.send(f"j{n}")
            known = [not isinstance(await it.status(f"j{n}"), Missing) for n in range(5)]
            assert known == [False, False, True, True, True]
        async with serving(keep_seconds=0) as it:
            it.model.end()
            await it.send()
            assert await it.status("job-1") == Missing()


class TestHealth:
    """Health reports, and the end of the server."""

    async def test_it_reports_its_active_jobs(self) -> None:
        """The health report contains the number and ids of active jobs, including those of direct callers (C22)."""
        async with serving(max_concurrent=2) as it:
            assert await it.health() == {"status": "ok", "active_jobs": 0, "jobs": []}
            call = asyncio.create_task(it.send("a"))
            await until(lambda: it.model.running == {"a"})
            await it.direct("b")
            seen = await it.caller.health(endpoint_of(it.url), SYNC)
            assert seen is not None
            assert (seen.active, seen.jobs) == (2, frozenset({"a", "b"}))
            it.model.end(2)
            await call
            await until(lambda: not it.model.running)
            assert (await it.health())["active_jobs"] == 0

    async def test_ended(self) -> None:
        """A server that shuts down cancels its running jobs and answers the waiting callers (C23, fault H4)."""
        app = GpuServer(Model(), max_concurrent=1)
        async with served(app) as origin, calling() as caller:
            call = asyncio.create_task(
                caller.send(lease_of(origin + "/x"), task_of(), SYNC, attempt=1)
            )
            await until(lambda: bool(app.jobs.active))
            await app.aclose()
            assert await call == JobFailedAnswer("HTTP 500: the server has shut down")

    async def test_ended_before_it_began(self) -> None:
        """A job that has not started when the server shuts down fails, and callers get an answer (C23, fault H4)."""
        app = GpuServer(Model(), max_concurrent=1)
        job = GpuJob("job-1", None, attempt=1, direct=False)
        app.jobs.add(job)
        await app.aclose()
        assert job.ended.is_set()
        assert (job.error, dict(app.jobs.active)) == ("the server has shut down", {})


class TestRequests:
    """Valid and invalid requests."""

    @pytest.mark.parametrize(
        ("body", "status"),
        [(b"", 400), (b"{", 400), (b"\xff", 400), (b"NaN", 400), (b"1e999", 400), (b"[" * 101 + b"]" * 101, 400)],
    )  # fmt: skip
    async def test_bodies(self, body: bytes, status: int) -> None:
        """A body that is not valid JSON is refused, and not repeated in the answer (C2)."""
        async with serving() as it:
            answer = await it.client.post(it.url, content=body, headers=DISPATCHER)
            assert answer.status_code == status
            assert set(answer.json()) == {"detail"}
            assert not it.model.runs

    @pytest.mark.parametrize("told", [True, False])
    async def test_sizes(self, told: bool) -> None:  # noqa: FBT001 - pytest passes it by name
        """A payload over the size limit is refused, with or without a Content-Length header (C2)."""
        async with serving(body_limit=100) as it:
            it.model.end(2)
            for size, status in [(100, 200), (101, 413)]:
                body = b'"' + b"x" * (size - 2) + b'"'

                async def parts(body: bytes = body) -> AsyncIterator[bytes]:
                    yield body[:50]
                    yield body[50:]

                content = body if told else parts()
                answer = await it.client.post(it.url, content=content, headers=DISPATCHER)
                assert answer.status_code == status

    async def test_slow_bodies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A request whose body does not arrive in time is ended, and occupies no slot (C2)."""
        monkeypatch.setattr(component, "_BODY_SECONDS", 0.1)
        async with serving() as it:
            host, port = it.origin.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n1")
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            writer.close()
            assert (await it.health())["active_jobs"] == 0

    @pytest.mark.parametrize("key", ["a b", "../x", "{}", "x" * 201])
    async def test_keys(self, key: str) -> None:
        """An Idempotency-Key that is not a valid name is refused (C2)."""
        async with serving() as it:
            answer = await it.client.post(it.url, json=1, headers={"Idempotency-Key": key})
            assert answer.status_code == 400

    async def test_places(self) -> None:
        """Unknown paths get 404, and wrong methods 405 (C4)."""
        async with serving() as it:
            for method, path, status in [
                ("GET", "/", 404), ("GET", "/status/", 404), ("GET", "/status/none", 404), ("PUT", "/generate", 405),
                ("DELETE", "/status/none", 404), ("DELETE", "/generate", 405), ("GET", "/health/x", 404),
            ]:  # fmt: skip
                answer = await it.client.request(method, it.origin + path)
                assert answer.status_code == status, path

    async def test_mounted(self) -> None:
        """Two models can be mounted in one application, each with its own paths (C4)."""
        flux, zimg = Model(), Model()
        app = Starlette(routes=[Mount("/flux", GpuServer(flux)), Mount("/zimg", GpuServer(zimg))])
        config = SYNC.model_copy(
            update={"poll_endpoint_template": "/flux/status/{id}", "health_path": "/flux/health"}
        )
        async with served(app) as origin, calling() as caller:
            flux.end()
            url = origin + "/flux/generate"
            sent = await caller.send(lease_of(url), task_of(), config, attempt=1)
            assert isinstance(sent, Done)
            assert await caller.ask(url, "job-1", config) == sent
            assert await caller.health(endpoint_of(url), config) is not None
            assert (flux.runs, zimg.runs) == ({"job-1": 1}, {})

    @pytest.mark.parametrize(
        "options", [{"max_concurrent": 0}, {"max_concurrent": True}, {"direct_queue": -1}, {"keep_count": 1.5}]
    )  # fmt: skip
    def test_options(self, options: dict[str, Any]) -> None:
        """An invalid option raises an error that names it when the server is created (C2)."""
        with pytest.raises(InvalidInput, match=next(iter(options))):
            GpuServer(Model(), **options)
