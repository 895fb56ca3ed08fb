"""Tests of the delivery of callbacks from their queue to the receivers."""

from __future__ import annotations

import logging
import ssl

import pytest
from standardwebhooks import Webhook

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.tasks import Published, Task
from taskqueue_dispatch.callbacks.tasks import callback_task
from taskqueue_dispatch.names import CALLBACKS, job_id
from taskqueue_memory import MemoryBackend
from tests.dispatch.calling_back import ended, failed_once, ids, job_for, quick, tell
from tests.dispatch.patience import PATIENCE, eventually
from tests.dispatch.receivers import (
    OK,
    Script,
    answer,
    flood,
    hang,
    raw,
    receiving,
    receiving_at,
    sending,
    settings,
)
from tests.redis.backends import housekept
from tests.server.tls import make_files

OLD = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEW = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"


class TestDelivered:
    """Callbacks that the receiver accepts at the first attempt."""

    async def test_signed_and_recorded(self, backend: Backend) -> None:
        """A callback reports the job's end, verifies with the old and the new secret, and is recorded (C7, OPEN-C7)."""
        async with receiving(answer(200, b"thanks")) as receiver:
            job = job_for(receiver, path="/hook?x=1")
            told = settings(receiver, webhook_secrets=(OLD, NEW))
            async with sending(backend, told) as sender:
                assert await sender.record(job.id) is None
                await sender.check(job.headers["callback-url"])
                await tell(backend, job, result='{"ü": [1.50]}'.encode())
                (record,) = await ended(sender, job)
        (call,) = receiver.calls
        assert call.target == "/hook?x=1"
        says = '{"job_id":"J","status":"done","result":{"ü": [1.50]}}'
        assert call.body.decode() == says.replace("J", job.id)
        assert call.headers["content-type"] == "application/json"
        for secret in (OLD, NEW):
            Webhook(secret).verify(call.body, call.headers)
        assert record.webhook_id == call.headers["webhook-id"]
        assert "." not in record.webhook_id
        assert (record.state, record.job_status, record.attempt) == ("delivered", "done", 1)
        assert (record.http_status, record.length, record.error) == (200, 6, None)
        assert record.seconds is not None

    async def test_sent_once(self, backend: Backend) -> None:
        """Publishing a callback again, even with another result, sends nothing (R15)."""
        async with receiving() as receiver:
            job = job_for(receiver)
            async with sending(backend, settings(receiver)) as sender:
                await tell(backend, job)
                await ended(sender, job)
                again = [callback_task(job, "done", result, None) for result in (b'{"a":1}', b"2")]
                told = await backend.publisher.publish(*again)
                assert [one.status for one in told] == [Published.DUPLICATE, Published.CONFLICT]
                other = job_for(receiver, "two")
                await tell(backend, other)
                await ended(sender, other)
        assert len(receiver.calls) == 2

    async def test_a_second_end(self, backend: Backend) -> None:
        """A failed job that is redriven and done is reported twice; the record is about the second report (R15)."""
        async with receiving() as receiver:
            job = job_for(receiver)
            async with sending(backend, settings(receiver)) as sender:
                await backend.publisher.publish(callback_task(job, "failed", None, "no"))
                assert (await ended(sender, job))[0].job_status == "failed"
                await tell(backend, job)
                await eventually(lambda: len(receiver.calls) == 2)

                async def newer() -> bool:
                    record = await sender.record(job.id)
                    return record is not None and record.job_status == "done"

                await eventually(newer)
        assert len(ids(receiver.calls)) == 2

    async def test_unsigned(self, backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
        """Without a secret, callbacks are sent unsigned, and one warning is logged (OPEN-C7)."""
        async with receiving() as receiver:
            with caplog.at_level(logging.WARNING, "taskqueue"):
                jobs = [job_for(receiver, name) for name in "ab"]
                async with sending(backend, settings(receiver)) as sender:
                    await tell(backend, *jobs)
                    await ended(sender, *jobs)
        assert all("webhook-signature" not in call.headers for call in receiver.calls)
        said = [one for one in caplog.messages if "WEBHOOK_SECRETS" in one]
        assert len(said) == 1

    async def test_tls(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """By default the receiver's certificate must be valid (Security 5)."""
        files = make_files(tmp_path_factory.mktemp("tls"))
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.load_cert_chain(files.good, files.key)
        backend = MemoryBackend()
        async with receiving(tls=server) as receiver:
            job = job_for(receiver)
            url = job.headers["callback-url"].replace("http", "https")
            job = Task(key=job.key, id=job.id, headers={"callback-url": url})
            told = settings(receiver, callback_http=False)
            async with sending(backend, told, tls=None) as sender:
                await tell(backend, job)
                assert (
                    await failed_once(sender, job)
                ).error == "the receiver's certificate is not valid"
            assert not receiver.calls
            good = ssl.create_default_context(cafile=str(files.authority))
            await control_of(backend).cancel(CALLBACKS, callback_task(job, "done", None, None).id)
            other = Task(key=job.key, id=job_id("m", "two"), headers={"callback-url": url})
            async with sending(backend, told, tls=good) as sender:
                await tell(backend, other)
                assert (await ended(sender, other))[0].state == "delivered"
        await backend.aclose()


class TestRefused:
    """Callbacks that the receiver does not accept (fault I1)."""

    @pytest.mark.parametrize(
        ("script", "error"),
        [
            (answer(500, b"x"), "HTTP 500 with 1 byte"),
            (answer(304), "HTTP 304 with 0 bytes"),
            (flood(503, []), "HTTP 503 with 65536 bytes"),
            (raw(b""), "no complete response"),
            (hang, "no answer in time"),
        ],
    )
    async def test_and_taken_later(self, backend: Backend, script: Script, error: str) -> None:
        """A response other than success is a failed attempt.

        The callback is sent again with the same id until it is accepted (R15, fault I1).
        """
        await quick(backend)
        seconds = 0.3 if "time" in error else PATIENCE
        async with receiving(script, script, OK) as receiver, housekept(backend):  # type: ignore[arg-type] # any has it
            job = job_for(receiver)
            async with sending(backend, settings(receiver, callback_timeout=seconds)) as sender:
                await tell(backend, job)
                assert (await failed_once(sender, job)).error == error
                (record,) = await ended(sender, job)
        assert record.state == "delivered"
        # on a busy machine, another attempt may time out
        assert record.attempt == len(receiver.calls) >= 3
        assert ids(receiver.calls) == {record.webhook_id}
        assert len({call.body for call in receiver.calls}) == 1

    async def test_out_of_attempts(self, backend: Backend) -> None:
        """After the last attempt the callback is a dead letter, which an operator can redrive (OPEN-C7)."""
        await quick(backend)
        async with receiving(*[answer(500)] * 3, OK) as receiver, housekept(backend):  # type: ignore[arg-type] # as above
            job = job_for(receiver)
            async with sending(backend, settings(receiver, callback_attempts=3)) as sender:
                await tell(backend, job)
                (record,) = await ended(sender, job)
                assert (record.state, record.attempt) == ("failed", 3)
                assert record.reason == "max_retries_exceeded"
                assert record.error == "HTTP 500 with 0 bytes"
                dead = await dead_letters_of(backend).get(CALLBACKS, record.webhook_id)
                assert dead is not None
                assert dead.reason == "max_retries_exceeded"
                assert [one.error for one in dead.history] == ["HTTP 500 with 0 bytes"] * 3
                await dead_letters_of(backend).redrive(CALLBACKS, record.webhook_id)
                await eventually(lambda: len(receiver.calls) == 4)
                (record,) = await ended(sender, job)
        assert record.state == "delivered"
        assert ids(receiver.calls) == {record.webhook_id}

    async def test_gone(self, backend: Backend) -> None:
        """The response 410 ends a callback without further attempts (fault I1)."""
        async with receiving(answer(410)) as receiver:
            job = job_for(receiver)
            async with sending(backend, settings(receiver)) as sender:
                await tell(backend, job)
                (record,) = await ended(sender, job)
        dead = await dead_letters_of(backend).get(CALLBACKS, record.webhook_id)
        assert dead is not None
        assert (record.state, dead.reason, len(receiver.calls)) == ("failed", "gone", 1)

    @pytest.mark.parametrize(
        ("script", "least"),
        [
            (answer(429, retry_after="120"), 120.0),
            (answer(503, retry_after="90"), 90.0),
            (answer(429), 30.0),
            (answer(502), 30.0),
            (answer(504), 30.0),
            (answer(500), 0.0),
            (answer(429, retry_after="0"), 0.0),
            (answer(503, retry_after="999999999"), 6 * 3600.0),
        ],
    )
    async def test_throttled(self, script: Script, least: float) -> None:
        """The next attempt waits for Retry-After, at most six hours, and at least for the policy's delay (fault I1)."""
        backend = MemoryBackend()
        async with receiving(script) as receiver:
            job = job_for(receiver)
            async with sending(backend, settings(receiver), uniform=lambda: 0.5) as sender:
                began = backend.now()
                await tell(backend, job)
                record = await failed_once(sender, job)
        assert record.state == "pending"
        due = (await backend.subscribe([CALLBACKS], "w").receive(1, 0)).due_at
        assert due is not None
        assert max(5.0, least) <= due - began < max(5.0, least) + 20
        await backend.aclose()

    async def test_elsewhere(self, backend: Backend) -> None:
        """A redirect is a failed attempt, and is not followed (Security 7, fault I1)."""
        async with receiving() as trap:
            places = {
                "cloud": "http://169.254.169.254/x/",
                "trap": f"http://127.0.0.1:{trap.port}/",
            }
            for name, place in places.items():
                async with receiving(answer(302, location=place)) as receiver:
                    job = job_for(receiver, name)
                    async with sending(backend, settings(receiver, trap)) as sender:
                        await tell(backend, job)
                        record = await failed_once(sender, job)
                assert record.error == "HTTP 302 with 0 bytes"
                assert receiver.touched == 1
        assert trap.touched == 0

    async def test_the_default_policy(self, backend: Backend) -> None:
        """By default plain HTTP, other ports and loopback addresses are each refused (Security 7)."""
        async with receiving() as receiver:
            port = (receiver.port,)
            for told, scheme, words in (
                (settings(receiver, callback_http=False), "http", "unencrypted http"),
                (settings(receiver, callback_ports=(443,)), "http", "port that is not allowed"),
                (settings(receiver, callback_networks=()), "http", "not public"),
                (settings(callback_http=False, callback_networks=(), callback_ports=port), "https", "not public"),
            ):  # fmt: skip
                job = job_for(
                    receiver,
                    f"{scheme}-{told.callback_http}-{told.callback_ports[0]}-{len(told.callback_networks)}",
                )
                url = job.headers["callback-url"].replace("http", scheme)
                job = Task(key=job.key, id=job.id, headers={"callback-url": url})
                async with sending(backend, told) as sender:
                    await tell(backend, job)
                    (record,) = await ended(sender, job)
                assert (record.state, record.reason) == ("failed", "refused")
                assert record.error is not None
                assert words in record.error
        assert receiver.touched == 0

    async def test_a_flipping_name(self, backend: Backend) -> None:
        """A callback is refused if its host resolves to a forbidden address when it is sent.

        At submit, the address was allowed (fault I3).
        """
        async with receiving_at("127.0.0.1", "127.0.0.2") as (trap, good):
            told = settings(good, callback_networks=("127.0.0.2/32",))
            answers = ["127.0.0.2", "127.0.0.1"]

            async def flips(_host: str, _port: int) -> tuple[str, ...]:
                return (answers.pop(0),)

            job = job_for(good, host="hooks.example")
            async with sending(backend, told, resolve=flips) as sender:
                await sender.check(job.headers["callback-url"])
                await tell(backend, job)
                (record,) = await ended(sender, job)
        assert (record.state, answers) == ("failed", [])
        assert good.touched == trap.touched == 0
