"""Tests of how the endpoint client interprets a GPU server's responses, over real sockets."""

from __future__ import annotations

import email.utils
import time
from typing import Any

import msgspec
import pytest

from taskqueue_dispatch.endpoint_client.answers import (
    DONE,
    FAILED,
    LONGEST_REST,
    Answer,
    Busy,
    Done,
    EndpointUnreachable,
    JobAcceptedAnswer,
    JobFailedAnswer,
    JobRunningAnswer,
    Missing,
)
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.names import job_id
from tests.dispatch.gpu_support import (
    ASYNC,
    SYNC,
    calling,
    endpoint_of,
    lease_of,
    response,
    said,
    task_of,
    trap,
)

PUSHED = ModelConfig(model_type=ModelType.ASYNC)
NAMED = ASYNC.model_copy(update={"id_field": "request"})
CANARY = "canary-7f3a"


async def sent(answer: bytes, config: ModelConfig = SYNC) -> Answer:
    """Send a job to a server that responds with these bytes, and return the client's answer."""
    async with trap(answer) as server, calling() as caller:
        return await caller.send(lease_of(server.url), task_of(), config, attempt=1)


async def asked(answer: bytes, config: ModelConfig = ASYNC, job: str = "r-1") -> Answer:
    """Poll a job's status on a server that responds with these bytes, and return the client's answer."""
    async with trap(answer) as server, calling() as caller:
        return await caller.ask(server.url, job, config)


class TestSync:
    """A synchronous model, whose response contains the result."""

    @pytest.mark.parametrize("word", [*sorted(DONE), "SUCCESS", " Completed "])
    async def test_success(self, word: str) -> None:
        """With each word for success, the result is returned byte for byte (C3, C4)."""
        body = b'{"status": "' + word.encode() + b'", "result": {"a" :1.50, "u":"\xc3\xa9"}}'
        assert await sent(response(200, body)) == Done(b'{"a" :1.50, "u":"\xc3\xa9"}')

    @pytest.mark.parametrize("status", [200, 201, 202])
    async def test_good_statuses(self, status: int) -> None:
        """With each of the statuses 200, 201 and 202, the body decides the outcome (C3)."""
        assert await sent(said(status, status="done", result=None)) == Done(b"null")

    @pytest.mark.parametrize("body", [b"[1,2]", b'"text"', b'{"image":"x"}', b"0"])
    async def test_plain(self, body: bytes) -> None:
        """A JSON body without a status is the result, so a server need not know dispatchers (C3)."""
        assert await sent(response(200, body)) == Done(body)

    async def test_success_without_a_result(self) -> None:
        """If a successful response has no result, the whole object is the result (C3)."""
        assert await sent(said(status="success", image="x")) == Done(
            b'{"status":"success","image":"x"}'
        )

    @pytest.mark.parametrize("word", sorted(FAILED))
    async def test_failure(self, word: str) -> None:
        """Each word for failure fails the job with the server's error, without control characters (C4)."""
        answer = await sent(said(status=word, error="out of\r\nmemory\x1b[31m"))
        assert answer == JobFailedAnswer("out of  memory [31m")
        assert await sent(said(status=word, error="x", final=True)) == JobFailedAnswer(
            "x", final=True
        )
        assert await sent(said(status=word, error={"a": 1})) == JobFailedAnswer(
            "the server reported a failure"
        )

    async def test_a_long_error_is_cut(self) -> None:
        """An error of the server is cut to 1000 characters (C4)."""
        answer = await sent(said(status="failed", error="x" * 100_000))
        assert isinstance(answer, JobFailedAnswer)
        assert len(answer.error) == 1000

    async def test_a_failure_with_its_status(self) -> None:
        """A failed job's error is also read from a response with an HTTP error status (C3)."""
        told = await sent(said(500, status="failed", error="out of memory"))
        assert told == JobFailedAnswer("HTTP 500: out of memory")
        told = await sent(said(422, status="failed", error="no prompt"))
        assert told == JobFailedAnswer("HTTP 422: no prompt", final=True)

    async def test_it_has_become_asynchronous(self) -> None:
        """If a synchronous model answers with an id, the job is polled like an asynchronous one (C3)."""
        assert await sent(said(status="processing", job_id="r-1")) == JobAcceptedAnswer("r-1")

    async def test_neither(self) -> None:
        """An unknown status without an id fails the job, with an error that says so (fault H5)."""
        answer = await sent(said(status="ok"))
        assert isinstance(answer, JobFailedAnswer)
        assert "job_id" in answer.error
        assert isinstance(await sent(said(status=3)), JobFailedAnswer)


class TestAsync:
    """An asynchronous model, whose response contains an id."""

    @pytest.mark.parametrize(
        ("fields", "config", "found"),
        [
            ({"job_id": "r-1"}, ASYNC, "r-1"),
            ({"id": "r-2"}, ASYNC, "r-2"),
            ({"id": "no", "job_id": "r-3"}, ASYNC, "r-3"),
            ({"request": "r-4", "job_id": "no"}, NAMED, "r-4"),
            ({"job_id": 17}, ASYNC, "17"),
            ({"job_id": "r 5/é"}, ASYNC, "r 5/é"),
            ({"job_id": "r-6"}, PUSHED, "r-6"),
            ({}, PUSHED, "job-1"),
        ],
    )
    async def test_ids(self, fields: dict[str, Any], config: ModelConfig, found: str) -> None:
        """The id is read from ``id_field``, job_id or id; a server that pushes need not send one (C5, C3, C7)."""
        assert await sent(said(status="processing", **fields), config) == JobAcceptedAnswer(found)
        assert await sent(said(202, **fields), config) == JobAcceptedAnswer(found)

    @pytest.mark.parametrize(
        "given", ["", ".", "..", "a\nb", "x" * 201, True, None, 1.5, ["r-1"], {"id": 1}]
    )
    async def test_unusable_ids(self, given: object) -> None:
        """An id that cannot be part of a URL fails the job (fault H5)."""
        for config in (ASYNC, PUSHED):
            answer = await sent(said(status="processing", job_id=given), config)
            assert isinstance(answer, JobFailedAnswer), config

    @pytest.mark.parametrize(
        "body", [b'{"status":"processing"}', b"{}", b"[]", b'"r-1"', b'{"status":"processing","request":1e999}']
    )  # fmt: skip
    async def test_without_an_id(self, body: bytes) -> None:
        """A response 200 without an id fails the attempt if the model has to be polled (fault H5)."""
        assert isinstance(await sent(response(200, body), NAMED), JobFailedAnswer)

    async def test_at_once(self) -> None:
        """An asynchronous server may answer with the result or the failure at once (C3)."""
        assert await sent(said(status="completed", result=[1]), ASYNC) == Done(b"[1]")
        assert await sent(said(status="error", error="no"), ASYNC) == JobFailedAnswer("no")


class TestNeverUsable:
    """Answers about another job, and streams."""

    @pytest.mark.parametrize(
        "kind", ["text/event-stream", "Text/Event-Stream; charset=utf-8", "application/x-ndjson"]
    )
    async def test_a_stream(self, kind: str) -> None:
        """A streamed answer fails the job for good, at once: each attempt would stream again (fault H5)."""
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n\r\ndata: 1\n\n".encode()
        failed = JobFailedAnswer(
            "HTTP 200: the response is a stream, which is not supported",
            final=True,
            reason="unusable_answer",
        )
        assert await sent(head) == failed
        assert await asked(head) == failed

    @pytest.mark.parametrize("config", [SYNC, ASYNC, NAMED], ids=["sync", "async", "named"])
    async def test_another_job(self, config: ModelConfig) -> None:
        """An answer about another job is not this job's result, and not the id to poll for (fault H5)."""
        name, other = config.id_field or "job_id", job_id("flux", "other")
        for fields in ({"status": "done", "result": 1}, {"status": "processing"}):
            answer = await sent(said(**fields, **{name: other}), config)
            assert answer == JobFailedAnswer(
                f"HTTP 200 with {len(msgspec.json.encode({**fields, name: other}))} bytes: "
                "the response is about another job",
                by_server=True,
            )

    async def test_its_own(self) -> None:
        """The job's own id and ids that the server has chosen are accepted (fault H5)."""
        for given in ("job-1", "run-7", "chatcmpl-1"):
            assert await sent(said(status="done", result=1, job_id=given)) == Done(b"1")


class TestStatuses:
    """The meaning of HTTP statuses."""

    @pytest.mark.parametrize("status", [400, 413, 415, 422])
    async def test_refused(self, status: int) -> None:
        """A status for an invalid job fails the job for good (fault H5)."""
        assert await sent(said(status, detail=CANARY)) == JobFailedAnswer(
            f"HTTP {status} with 24 bytes", final=True
        )

    @pytest.mark.parametrize(
        ("status", "why"),
        [(401, "credentials"), (403, "denied"), (404, "path"), (405, "not accept POST")],
    )
    async def test_misconfigured(self, status: int, why: str) -> None:
        """A status of a wrongly configured endpoint fails the attempt, but the job may go to another one (fault H5)."""
        answer = await sent(said(status, detail=CANARY))
        assert isinstance(answer, JobFailedAnswer)
        assert why in answer.error
        assert not answer.final

    @pytest.mark.parametrize("status", [408, 425, 429, 503])
    async def test_busy(self, status: int) -> None:
        """A status for a busy server is not a failure (C2, FIX-C3, fault H5)."""
        assert await sent(said(status)) == Busy()
        assert await sent(response(status, b"no JSON", "Retry-After: 7")) == Busy(7.0)

    async def test_retry_after(self) -> None:
        """Retry-After may be seconds or a date, and is clamped; any other value is ignored (fault H5)."""
        soon = email.utils.formatdate(time.time() + 60, usegmt=True)
        answer = await sent(response(503, b"", f"Retry-After: {soon}"))
        assert isinstance(answer, Busy)
        assert answer.retry_after is not None
        assert 50 < answer.retry_after <= 60
        past = email.utils.formatdate(0, usegmt=True)
        for told, meant in [
            ("0", 0.0), ("-5", 0.0), ("1e99", LONGEST_REST), ("inf", LONGEST_REST), ("nan", None),
            (past, 0.0), ("later", None), ("Mon, 99 Foo 2026 99:99:99 GMT", None), ("9" * 5000, LONGEST_REST),
        ]:  # fmt: skip
            assert await sent(response(503, b"", f"Retry-After: {told}")) == Busy(meant), told

    @pytest.mark.parametrize("status", [502, 504])
    async def test_on_the_way(self, status: int) -> None:
        """After a response 502 or 504, probably from a proxy, the GPU server may have the job (fault H5)."""
        assert await sent(said(status)) == EndpointUnreachable(
            f"HTTP {status} with 2 bytes", sent=True
        )

    @pytest.mark.parametrize("status", [204, 206, 300, 402, 409, 418, 451, 500, 501, 505, 599])
    async def test_any_other(self, status: int) -> None:
        """Any other status fails the attempt, and the error does not contain the body (fault H5)."""
        body = b"" if status == 204 else CANARY.encode()
        answer = await sent(response(status, body))
        assert isinstance(answer, JobFailedAnswer)
        assert f"HTTP {status} with {len(body)} bytes" in answer.error
        assert not answer.final
        assert CANARY not in answer.error


class TestAsking:
    """Polls of a job that was sent earlier."""

    @pytest.mark.parametrize("word", [*sorted(DONE), "Success"])
    async def test_success(self, word: str) -> None:
        """Each word for success returns the result (C4)."""
        assert await asked(said(status=word, result={"a": 1})) == Done(b'{"a":1}')

    @pytest.mark.parametrize("word", sorted(FAILED))
    async def test_failure(self, word: str) -> None:
        """Each word for failure fails the job (C4)."""
        assert await asked(said(status=word, error="no")) == JobFailedAnswer("no")

    @pytest.mark.parametrize(
        "word", ["processing", "queued", "succeeded", "IN_PROGRESS", "cancelled"]
    )
    async def test_any_other_word(self, word: str) -> None:
        """Any other word means that the job is running; a valid progress is returned (C4)."""
        assert await asked(said(status=word)) == JobRunningAnswer()
        assert await asked(said(status=word, progress=0.5)) == JobRunningAnswer(0.5)
        assert await asked(said(status=word, progress="step 3")) == JobRunningAnswer("step 3")
        assert await asked(said(status=word, progress=True)) == JobRunningAnswer()
        assert await asked(response(200, b'{"status":"x","progress":1e999}')) == JobRunningAnswer()

    @pytest.mark.parametrize("status", [404, 410])
    async def test_missing(self, status: int) -> None:
        """The statuses 404 and 410 mean that the server does not know the job (C23, fault H4)."""
        assert await asked(response(status, b"x")) == Missing()

    async def test_busy(self) -> None:
        """If the server is busy, the poll is repeated later (fault H5)."""
        assert await asked(response(429, b"", "retry-after: 3")) == Busy(3.0)

    @pytest.mark.parametrize("status", [204, 301, 400, 401, 403, 405, 409, 500, 502, 504])
    async def test_other_statuses(self, status: int) -> None:
        """Any other status fails only the poll, not the job (fault H5)."""
        answer = await asked(response(status, b"" if status == 204 else CANARY.encode()))
        assert isinstance(answer, EndpointUnreachable)
        assert answer.sent
        assert CANARY not in answer.error

    @pytest.mark.parametrize(
        "body",
        [b"", b"no JSON", b"[]", b"{}", b'{"status":7}', b'{"status":"', b'{"status":"done"}\xff'],
    )
    async def test_garbage(self, body: bytes) -> None:
        """An invalid body fails only the poll, not the job (fault H5)."""
        assert isinstance(await asked(response(200, body)), EndpointUnreachable)

    @pytest.mark.parametrize("given", ["r-2", "", 1, None])
    async def test_another_job(self, given: object) -> None:
        """A response with another job's id is not accepted as a result (fault H5)."""
        told = await asked(said(status="done", result=1, job_id=given))
        assert told == EndpointUnreachable("the response is about another job", sent=True)
        told = await asked(said(status="done", result=1, request=given), NAMED)
        assert told == EndpointUnreachable("the response is about another job", sent=True)
        assert await asked(said(status="done", result=1, job_id="r-1")) == Done(b"1")
        assert await asked(said(status="done", result=1, id=1), NAMED) == Done(b"1")

    async def test_a_model_without_a_status_url(self) -> None:
        """A model without ``poll_endpoint_template`` cannot be polled, and no connection is opened (C5)."""
        async with trap(said(status="done", result=1)) as server, calling() as caller:
            answer = await caller.ask(server.url, "r-1", ModelConfig())
            assert answer == EndpointUnreachable(
                "the model has no poll_endpoint_template", sent=False
            )
            assert not server.connections


class TestHealth:
    """Health reports of GPU servers."""

    async def test_good(self) -> None:
        """The report contains the number of active jobs, and optionally their ids (C22)."""
        expected: list[tuple[dict[str, Any], int, frozenset[str] | None]] = [
            ({"active_jobs": 0}, 0, None),
            ({"active_jobs": 2, "jobs": ["a", "b"], "gpu": "x"}, 2, frozenset({"a", "b"})),
            ({"active_jobs": 0, "jobs": []}, 0, frozenset()),
        ]
        for fields, active, jobs in expected:
            async with trap(said(**fields)) as server, calling() as caller:
                seen = await caller.health(endpoint_of(server.url), ModelConfig())
                assert seen is not None
                assert (seen.active, seen.jobs) == (active, jobs)

    @pytest.mark.parametrize(
        "answer",
        [
            said(), said(active_jobs="0"), said(active_jobs=-1), said(active_jobs=True), said(active_jobs=0.5),
            said(active_jobs=10**7), said(active_jobs=0, jobs=7), said(active_jobs=1, jobs=[1]), response(200, b"["),
            response(200, b"[" * 100_000), said(500, active_jobs=0), said(503, active_jobs=0), said(302, active_jobs=0),
            b"nonsense\r\n\r\n",
        ],
    )  # fmt: skip
    async def test_not_well(self, answer: bytes) -> None:
        """An invalid or failed health report counts as not healthy, and raises no error (C22, fault H5)."""
        async with trap(answer) as server, calling() as caller:
            assert await caller.health(endpoint_of(server.url), ModelConfig()) is None
