"""Workers that are older or newer than the server, on raw sockets: what one side lacks is not used."""

from __future__ import annotations

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
