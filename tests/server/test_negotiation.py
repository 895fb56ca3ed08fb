"""Workers that are older or newer than the server, on raw sockets: what one side lacks is not used."""

from __future__ import annotations

import pytest
from websockets.exceptions import ConnectionClosed

from taskqueue_core.after import After, TaskRef
from taskqueue_core.application.encoding import CODEC_HEADER
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.protocol.frames import FEATURES
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import DeadLetter
from taskqueue_memory import MemoryBackend
from tests.server.support import running


async def test_an_old_worker_with_a_new_server() -> None:
    """A worker that names no features works as before, and its retries count attempts (U5)."""
    async with running() as it, it.worker(credit=5) as worker:
        assert worker.welcome["features"] == list(FEATURES)
        await it.publish("a", max_attempts=2)
        for attempt in (1, 2):
            (got,) = await worker.deliveries(1)
            assert (got["attempt"], got.get("prior", 0)) == (attempt, 0)
            await worker.send("retry", receipt=got["receipt"], error="later", delay=0)
        await it.reaches(dead=1)


async def test_a_snooze_costs_no_attempt() -> None:
    """A retry frame with ``free`` runs the task again, however often, and leaves its attempts and no error (U5)."""
    backend = MemoryBackend()
    async with running(backend) as it, it.worker(credit=9, features=["snooze", "later"]) as worker:
        policy = RetryPolicy(base=0, jitter=0, max_attempts=2)
        await backend.control.configure("k", QueueSettings(retry=policy))
        await it.publish("a")
        for snoozes in range(4):
            (got,) = await worker.deliveries(1)
            assert (got["attempt"], got.get("prior", 0)) == (1 + snoozes, snoozes)
            await worker.send("retry", receipt=got["receipt"], delay=0, free=True)
        for attempt in (5, 6):
            (got,) = await worker.deliveries(1)
            assert (got["attempt"], got["prior"]) == (attempt, 4)
            await worker.send("retry", receipt=got["receipt"], error="boom")
        await it.reaches(dead=1)
        (letter,) = await backend.dead_letters.list("k")
        assert [failure.error for failure in letter.history] == ["boom", "boom"]


async def test_tracebacks_are_kept_unless_the_queue_excludes_them() -> None:
    """Failures keep the tracebacks that a worker sends; ``keep_tracebacks=False`` leaves out new ones (U10)."""
    backend = MemoryBackend()
    policy = RetryPolicy(base=0, jitter=0, max_attempts=3)
    async with running(backend) as it, it.worker(credit=9) as worker:
        settings = await backend.control.configure("k", QueueSettings(retry=policy))
        await it.publish("a")
        letters: tuple[DeadLetter, ...] = ()
        for number in (1, 2, 3):
            (got,) = await worker.deliveries(1)
            sent = {"receipt": got["receipt"], "error": "e", "traceback": f"Traceback {number}"}
            if number == 1:
                await worker.send("retry", delay=0, **sent)
                continue
            await worker.send("dead_letter", reason="no", **sent)
            await it.reaches(dead=1)
            letters = await backend.dead_letters.list("k")
            if number == 2:
                hidden = settings.model_copy(update={"keep_tracebacks": False})
                await backend.control.configure("k", hidden)
                await backend.dead_letters.redrive("k")
        kept = [failure.traceback for failure in letters[0].history]
        assert kept == ["Traceback 1", "Traceback 2", None]
        await backend.dead_letters.discard("k")
        (status,) = await backend.control.statuses("k", "a")
        assert status is not None
        assert (status.error, status.last_failure) == (None, letters[0].history[-1])


async def test_a_worker_that_cannot_end_attempts(caplog: pytest.LogCaptureFixture) -> None:
    """U3: a worker without the feature ``timeouts`` gets no task of a queue with a timeout, and is told why."""
    async with running(backend := MemoryBackend()) as it:
        await backend.control.configure("timed", QueueSettings(timeout=5))
        await it.publish("a", key="timed")
        await it.publish("b", key="plain")
        async with it.worker("old", "timed", "plain", credit=5) as old:
            error = await old.frame("error")
            assert (error["code"], "of timed: queues with a timeout" in error["message"]) == (
                "timeouts",
                True,
            )
            (got,) = await old.deliveries(1)
            assert (got["task"]["key"], "timeout" in got) == ("plain", False)
            assert [info.keys for info in await backend.control.workers()] == [("plain",)]
            assert caplog.text.count("worker gets no tasks of queues with a timeout") == 1
            async with it.worker("new", "timed", credit=5, features=["timeouts"]) as new:
                (got,) = await new.deliveries(1)
                assert (got["task"]["id"], got["timeout"]) == ("a", 5)
        refused = it.worker("old", "timed")
        with pytest.raises(ConnectionClosed):
            await refused.__aenter__()
        assert (refused.socket.close_code, refused.passed_over[0]["code"]) == (1013, "timeouts")


async def test_a_timeout_that_is_removed() -> None:
    """U3: an old worker gets a queue back whose timeout was removed: it reconnects, and keeps its tasks."""
    async with running(backend := MemoryBackend(), lease=3) as it:
        await backend.control.configure("timed", QueueSettings(timeout=5))
        await it.publish("running", key="plain")
        await it.publish("a", key="timed")
        async with it.worker("old", "timed", "plain", credit=5) as old:
            (held,) = await old.deliveries(1)
            settings = await backend.control.settings("timed")
            changed = settings.model_copy(update={"timeout": None})
            await backend.control.configure("timed", changed)
            assert await old.closed() == 1012
        holding = [held["receipt"]]
        async with it.worker("old", "timed", "plain", credit=5, holding=holding) as old:
            assert old.welcome["adopted"] == holding
            (got,) = await old.deliveries(1)
            assert got["task"]["id"] == "a"
            await old.send("ack", receipts=[*holding, got["receipt"]])
            assert await old.settled(2) == ([*holding, got["receipt"]], [])


async def test_a_timeout_that_is_set_while_an_old_worker_is_connected() -> None:
    """U3: the delivery goes to another worker; the old one reconnects, keeps its tasks, and gets other queues."""
    async with running(backend := MemoryBackend()) as it:
        await it.publish("running", key="plain")
        async with it.worker("old", "timed", "plain", credit=5) as old:
            (held,) = await old.deliveries(1)
            await backend.control.configure("timed", QueueSettings(timeout=5))
            await it.publish("a", key="timed")
            assert await old.closed() == 1012
        async with (
            it.worker("old", "timed", "plain", credit=5, holding=[held["receipt"]]) as old,
            it.worker("new", "timed", credit=5, features=["timeouts"]) as new,
        ):
            assert old.welcome["adopted"] == [held["receipt"]]
            (got,) = await new.deliveries(1)
            assert (got["task"]["id"], got["attempt"], got.get("losses", 0)) == ("a", 1, 0)
            await old.send("ack", receipts=[held["receipt"]])
            assert await old.settled(1) == ([held["receipt"]], [])


async def test_a_worker_that_knows_no_inputs(caplog: pytest.LogCaptureFixture) -> None:
    """U16: a worker without the feature ``inputs`` gets no task with results of others, is told why, and works on.

    The task keeps its attempts, and a worker with the feature gets it with the results.
    """
    async with running(backend := MemoryBackend()) as it:
        await it.publish("a", "b")
        inputs = After(tasks=(TaskRef("k", "a"), TaskRef("k", "b")), when="ended", inputs=(1, 0))
        await it.publish("sum", after=inputs)
        await it.publish("last", after=After(tasks=(TaskRef("k", "a"),)))
        async with it.worker("old", credit=9, features=["timeouts"]) as old:
            first, second = await old.deliveries(2)
            assert (first["task"]["id"], second["task"]["id"]) == ("a", "b")
            results = {first["receipt"]: {"n": 1}}
            await old.send("ack", receipts=[first["receipt"]], results=results)
            await old.settled(1)
            await backend.control.cancel("k", "b")
            (got,) = await old.deliveries(1)
            assert got["task"]["id"] == "last"
            assert (await old.frame("error"))["code"] == "inputs"
            await it.reaches(scheduled=1, in_flight=1)
            assert caplog.text.count("worker gets no tasks with inputs") == 1
        assert await backend.control.reschedule("k", "sum", 0)
        async with it.worker("new", credit=9, features=["inputs"]) as new:
            got = {each["task"]["id"]: each for each in await new.deliveries(2)}["sum"]
            assert got["inputs"] == [None, {"n": 1}]
            assert (got["attempt"], got["prior"]) == (2, 1)
            assert got["task"]["after"]["inputs"] == [1, 0]


async def test_a_worker_that_knows_no_codecs(caplog: pytest.LogCaptureFixture) -> None:
    """U17: a worker without the feature ``codecs`` gets no encoded task, is told why once, and works on."""
    encoded = {CODEC_HEADER: "zlib"}
    async with running(MemoryBackend()) as it:
        await it.publish("a", "b", payload=b'"AHg="', headers=encoded)
        await it.publish("plain")
        async with it.worker("old", credit=9, features=["timeouts", "inputs"]) as old:
            (got,) = await old.deliveries(1)
            assert got["task"]["id"] == "plain"
            error = await old.frame("error")
            assert error["code"] == "codecs"
            assert "with the feature 'codecs'" in error["message"]
            await it.reaches(scheduled=2, in_flight=1)
            await it.publish("c", payload=b'"AHg="', headers=encoded)
            await it.reaches(scheduled=3, in_flight=1)
            await old.send("ack", receipts=[got["receipt"]])
            assert await old.settled(1) == ([got["receipt"]], [])
            assert caplog.text.count("worker gets no tasks with codecs: it is too old") == 1
        for name in ("a", "b", "c"):
            assert await it.context.control.reschedule("k", name, 0)
        async with it.worker("new", credit=9, features=["codecs"]) as new:
            for delivery in await new.deliveries(3):
                assert (delivery["attempt"], delivery["prior"]) == (2, 1)
                assert delivery["task"]["payload"] == "AHg="
