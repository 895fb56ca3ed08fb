"""How a local worker ends: when it is stopped, through a handler, or during an outage of the store."""

from __future__ import annotations

import asyncio
import threading

import pytest

from taskqueue_core.capabilities import control_of
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker, Quarantine
from taskqueue_worker import WorkerQuarantined as Quarantined
from tests.server.flaky import Flaky
from tests.worker.local import ledger_when, publish, serving, status, until


async def test_stopping_finishes_running_tasks_and_releases_the_rest() -> None:
    """A13: a stopping worker finishes its running tasks and receives no new ones.

    Released tasks lose no attempt and do not count as lost.
    """
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend, concurrency=2)
    go_on = asyncio.Event()
    started: list[int] = []

    @worker.task("work")
    async def wait(n: int) -> None:
        started.append(n)
        await go_on.wait()

    ids = await publish(backend, *range(5))
    async with serving(worker) as ended:
        await until(lambda: len(started) == 2)
        worker.stop()
        await asyncio.sleep(0.01)
        go_on.set()
        await ended
        await ledger_when(backend, lambda ledger: (ledger.done, ledger.waiting) == (2, 3))
    rest = [await status(backend, one) for one in ids[2:]]
    assert [(one.state, one.attempt, one.losses) for one in rest] == [(State.WAITING, 1, 0)] * 3


@pytest.mark.parametrize("cancel", [True, False])
async def test_what_outlasts_the_grace_is_released(*, cancel: bool) -> None:
    """D10: tasks that are still running after the grace are released before the worker ends.

    Their coroutines are cancelled, and their threads are abandoned.
    """
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend, grace=0.05)
    hang = threading.Event()
    started: list[str] = []

    @worker.task("work")
    async def wait() -> None:
        started.append("work")
        await asyncio.sleep(60)

    @worker.task("sync")
    def block() -> None:
        started.append("sync")
        hang.wait(30)

    await publish(backend, None)
    await publish(backend, None, key="sync")
    async with serving(worker) as ended:
        await until(lambda: len(started) == 2)
        if cancel:
            ended.cancel()
        else:
            worker.stop()
        await asyncio.wait([ended])
        for key in ("work", "sync"):
            ledger = await control_of(backend).ledger(key)
            assert (ledger.waiting, ledger.in_flight) == (1, 0)
            assert (await control_of(backend).stats(key)).lost == 0
    hang.set()


@pytest.mark.parametrize(
    ("error", "lost"), [(SystemExit(7), 1), (KeyboardInterrupt(), 0)], ids=("exit", "interrupt")
)
async def test_a_handler_that_ends_the_process(error: BaseException, lost: int) -> None:
    """Fault A11: a handler that raises `SystemExit` or `KeyboardInterrupt` ends the worker after its other tasks.

    An exit counts as a loss of the task, an interrupt does not.
    """
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)
    running = asyncio.Event()

    @worker.task("work")
    async def leave() -> None:
        await running.wait()
        raise error

    @worker.task("other")
    async def wait() -> None:
        running.set()
        await asyncio.sleep(0.05)

    (one,) = await publish(backend, None)
    await publish(backend, None, key="other")
    with pytest.raises(type(error)):
        await worker.serve()
    assert (await control_of(backend).ledger("other")).done == 1
    found = await status(backend, one)
    assert (found.state, found.attempt, found.losses) == (State.WAITING, 1, lost)


@pytest.mark.fast_clock
async def test_outages_only_delay(caplog: pytest.LogCaptureFixture) -> None:
    """Fault B1, fault E2: tasks that finish during an outage are acked after it, and not run again."""
    backend = Flaky()
    worker = LocalWorker(backend=backend, concurrency=5)
    runs: list[int] = []
    go_on = asyncio.Event()

    @worker.task("work")
    async def note(n: int) -> None:
        runs.append(n)
        await go_on.wait()

    await publish(backend, *range(20))
    async with serving(worker) as ended:
        await until(lambda: len(runs) == 5)
        backend.down.set()
        go_on.set()
        await asyncio.sleep(0.05)
        backend.lost = 2
        backend.down.clear()
        await ledger_when(backend, lambda ledger: ledger.done == 20)
        assert not ended.done()
    assert sorted(runs) == list(range(20))
    assert "store unavailable" in caplog.text


async def test_stopping_does_not_wait_for_a_store_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stopping worker waits only a limited time for confirmations of an unavailable store."""
    monkeypatch.setattr("taskqueue_worker.run._CONFIRM_SECONDS", 0.05)
    monkeypatch.setattr("taskqueue_core.consumer.outage._TRIES", 1)
    backend = Flaky()
    worker = LocalWorker(backend=backend)

    @worker.task("work")
    async def cut() -> None:
        backend.down.set()

    await publish(backend, None)
    async with serving(worker) as ended:
        await backend.down.wait()
        worker.stop()
        await asyncio.wait_for(ended, 30)


async def test_a_closed_backend_ends_the_worker() -> None:
    """If its backend is closed, the worker ends with an error instead of waiting forever."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)

    @worker.task("work")
    async def act() -> None:
        """Do nothing."""

    async with serving(worker) as ended:
        await asyncio.sleep(0.01)
        await backend.aclose()
        with pytest.raises(SubscriptionClosed):
            await ended


async def test_a_quarantine_that_is_over_at_once() -> None:
    """D6: if a success ends a quarantine at once, the interrupted receive is started again."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend, quarantine=lambda: Quarantine(1))
    go_on = asyncio.Event()
    started: list[bool] = []

    @worker.task("work")
    async def act(fails: bool) -> None:  # noqa: FBT001 - the payload is passed by position
        started.append(fails)
        await go_on.wait()
        if fails:
            raise ValueError

    await publish(backend, True, False)  # noqa: FBT003 - the booleans are payloads
    async with serving(worker) as ended:
        await until(lambda: len(started) == 2)
        go_on.set()
        await ledger_when(backend, lambda ledger: (ledger.scheduled, ledger.done) == (1, 1))
        await publish(backend, False)  # noqa: FBT003 - the boolean is a payload
        await ledger_when(backend, lambda ledger: ledger.done == 2)
        assert not ended.done()


async def test_a_worker_that_only_fails_is_quarantined() -> None:
    """D6: a worker whose tasks all fail pauses, tries one task at a time, and ends if they fail, too."""
    backend = MemoryBackend()
    worker = LocalWorker(
        backend=backend, concurrency=3, quarantine=lambda: Quarantine(3, cooldown=0.01, probes=2)
    )

    @worker.task("work")
    async def fail() -> None:
        raise ValueError

    await publish(backend, *[None] * 20)
    with pytest.raises(Quarantined):
        await worker.serve()
    ledger = await control_of(backend).ledger("work")
    assert (ledger.in_flight, ledger.waiting + ledger.scheduled) == (0, 20)
