"""A worker on a backend of its own: the same verdicts as over a socket, settled in batches."""

from __future__ import annotations

import asyncio
import threading

import pytest

from taskqueue_core.backend import Capabilities
from taskqueue_core.capabilities import QueueSettings, control_of, dead_letters_of
from taskqueue_core.capabilities.control import Maintained
from taskqueue_core.consuming import housekeeping
from taskqueue_core.errors import CapabilityMissing, ConfigurationError, SubscriptionClosed
from taskqueue_core.queue import Queue
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import State
from taskqueue_core.worker import Context, LocalWorker, Quarantine, Reject, Retry, Worker
from taskqueue_core.worker import WorkerQuarantined as Quarantined
from taskqueue_memory import MemoryBackend
from tests.server.flaky import Flaky
from tests.worker.local import ledger_when, publish, serving, status, until


async def test_tasks_of_every_kind_are_executed_and_acked() -> None:
    """D5, A17: coroutines in the loop, functions in threads; results are stored with the ack."""
    backend = MemoryBackend()
    worker = LocalWorker(backend, concurrency=7)
    here = threading.get_ident()

    @worker.task("work")
    async def double(n: int) -> int:
        assert threading.get_ident() == here
        await asyncio.sleep(0)
        return 2 * n

    @worker.task("sync")
    def triple(n: int) -> int:
        assert threading.get_ident() != here
        return 3 * n

    numbers = range(300)
    ids = await publish(backend, *numbers)
    others = await publish(backend, *numbers, key="sync")
    async with serving(worker):
        await ledger_when(backend, lambda ledger: ledger.done == 300)
        await ledger_when(backend, lambda ledger: ledger.done == 300, "sync")
    queue = Queue(backend)
    assert [await queue.result("work", one) for one in ids] == [2 * n for n in numbers]
    assert [await queue.result("sync", one) for one in others] == [3 * n for n in numbers]


async def test_each_outcome_has_its_verb() -> None:
    """REV-E1: done, retried and dead are three ends, with the errors that a websocket worker reports."""
    backend = MemoryBackend()
    worker = LocalWorker(backend)
    cases: dict[str, BaseException] = {
        "retry": Retry(delay=60, error="later"),
        "reject": Reject("bad", "because"),
        "error": ValueError("wrong"),
        "cancelled": asyncio.CancelledError(),
    }

    @worker.task("work")
    async def act(case: str) -> None:
        raise cases[case]

    ids = dict(zip([*cases, 3], await publish(backend, *cases, 3), strict=True))
    async with serving(worker):
        await ledger_when(backend, lambda ledger: (ledger.dead, ledger.scheduled) == (2, 3))
    assert (await status(backend, ids["retry"])).error == "later"
    assert (await status(backend, ids["error"])).error == "ValueError: wrong"
    assert (await status(backend, ids["cancelled"])).error == "CancelledError"
    dead = {one.task.id: one for one in await dead_letters_of(backend).list("work")}
    assert dead[ids["reject"]].reason == "bad"
    assert dead[ids[3]].reason == "invalid_payload"


async def test_settings_are_read_for_each_verdict() -> None:
    """Law 9: the queue's own retry policy decides, as it is at that moment."""
    backend = MemoryBackend()
    control = control_of(backend)
    worker = LocalWorker(backend)

    @worker.task("work")
    async def fail() -> None:
        raise ValueError

    async with serving(worker):
        await publish(backend, None)
        await ledger_when(backend, lambda ledger: ledger.scheduled == 1)
        await control.configure("work", QueueSettings(retry=RetryPolicy(max_attempts=1)))
        await publish(backend, None)
        await ledger_when(backend, lambda ledger: ledger.dead == 1)
    (dead,) = await dead_letters_of(backend).list("work")
    assert dead.reason == "max_retries_exceeded"


async def test_a_cancelled_task_is_cancelled_here() -> None:
    """What is revoked is no longer worked on: a coroutine is cancelled, and its slot is free again."""
    backend = MemoryBackend()
    worker = LocalWorker(backend, concurrency=1)
    contexts: list[Context] = []

    @worker.task("work")
    async def wait(context: Context) -> None:
        contexts.append(context)
        if len(contexts) == 1:
            await asyncio.sleep(60)

    first, _ = await publish(backend, None, None)
    async with serving(worker):
        await until(lambda: contexts)
        assert await control_of(backend).cancel("work", first)
        await ledger_when(backend, lambda ledger: (ledger.cancelled, ledger.done) == (1, 1))
    assert [context.revoked for context in contexts] == [True, False]


async def test_progress_is_noted() -> None:
    """From a coroutine and from a thread."""
    backend = MemoryBackend()
    worker = LocalWorker(backend)
    go_on = threading.Event()

    @worker.task("work")
    def half(context: Context) -> None:
        context.progress(0.5)
        assert go_on.wait(5)

    (one,) = await publish(backend, None)
    async with serving(worker):
        async with asyncio.timeout(5):
            while (await status(backend, one)).progress != 0.5:  # noqa: ASYNC110 - it rings no bell
                await asyncio.sleep(0.001)
        go_on.set()
        await ledger_when(backend, lambda ledger: ledger.done == 1)


async def test_acks_are_gathered_and_a_lone_one_goes_at_once() -> None:
    """What ends while a settlement is under way goes together in the next one."""
    backend = Flaky(slowness=0.02)
    worker = LocalWorker(backend, concurrency=200, prefetch=0)

    @worker.task("work")
    async def wait(n: int) -> None:
        await asyncio.sleep(n / 5000)

    async with serving(worker):
        await publish(backend, 0)
        await ledger_when(backend, lambda ledger: ledger.done == 1)
        assert backend.calls.count("ack") == 1
        await publish(backend, *range(200))
        await ledger_when(backend, lambda ledger: ledger.done == 201)
    assert backend.calls.count("ack") <= 10


async def test_nothing_is_fetched_that_cannot_run_soon() -> None:
    """D16: while tasks take long no more are held than run; what was fetched ahead for fast ones goes back."""
    backend = MemoryBackend()
    worker = LocalWorker(backend, concurrency=10)
    running = most = 0
    slow = asyncio.Event()

    @worker.task("work")
    async def act(*, wait: bool) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await (slow.wait() if wait else asyncio.sleep(0.0005))
        running -= 1

    async with serving(worker):
        await publish(backend, *[{"wait": False}] * 1000, *[{"wait": True}] * 50)
        ledger = await ledger_when(
            backend, lambda ledger: (ledger.done, ledger.in_flight) == (1000, 10)
        )
        assert ledger.waiting == 40
        slow.set()
        await ledger_when(backend, lambda ledger: ledger.done == 1050)
    assert most == 10


async def test_stopping_finishes_what_runs_and_hands_back_the_rest() -> None:
    """A13: a worker that stops takes nothing new; nothing that it hands back counts as an attempt or a loss."""
    backend = MemoryBackend()
    worker = LocalWorker(backend, concurrency=2)
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
async def test_what_outlasts_the_grace_is_handed_back(*, cancel: bool) -> None:
    """D10: coroutines are cancelled, threads are left; both tasks are back before the worker has ended."""
    backend = MemoryBackend()
    worker = LocalWorker(backend, grace=0.05)
    hang = threading.Event()
    started: list[str] = []

    @worker.task("work")
    async def wait() -> None:
        started.append("work")
        await asyncio.sleep(60)

    @worker.task("sync")
    def block() -> None:
        started.append("sync")
        hang.wait(10)

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
    """Fault A11: other tasks are finished; an exit counts as a loss of its task, an interrupt does not."""
    backend = MemoryBackend()
    worker = LocalWorker(backend)
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


async def test_outages_only_delay(caplog: pytest.LogCaptureFixture) -> None:
    """Fault B1, fault E2: what was executed while the store was away is acked once it is back, and not run again."""
    backend = Flaky()
    worker = LocalWorker(backend, concurrency=5)
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
    assert "the store is out of reach" in caplog.text


async def test_stopping_does_not_wait_for_a_store_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time to confirm is bounded; what is unconfirmed then is the store's to find out."""
    monkeypatch.setattr("taskqueue_core.worker.shift._CONFIRM_SECONDS", 0.05)
    monkeypatch.setattr("taskqueue_core.consuming.handing_back._TRIES", 1)
    backend = Flaky()
    worker = LocalWorker(backend)

    @worker.task("work")
    async def cut() -> None:
        backend.down.set()

    await publish(backend, None)
    async with serving(worker) as ended:
        await backend.down.wait()
        worker.stop()
        await asyncio.wait_for(ended, 5)


async def test_a_closed_backend_ends_the_worker() -> None:
    """It says so, rather than idle for ever."""
    backend = MemoryBackend()
    worker = LocalWorker(backend)

    @worker.task("work")
    async def act() -> None:
        """Do nothing."""

    async with serving(worker) as ended:
        await asyncio.sleep(0.01)
        await backend.aclose()
        with pytest.raises(SubscriptionClosed):
            await ended


async def test_a_worker_that_only_fails_is_quarantined() -> None:
    """D6: it rests, tries one task at a time, and gives up."""
    backend = MemoryBackend()
    worker = LocalWorker(
        backend, concurrency=3, quarantine=lambda: Quarantine(3, cooldown=0.01, probes=2)
    )

    @worker.task("work")
    async def fail() -> None:
        raise ValueError

    await publish(backend, *[None] * 20)
    with pytest.raises(Quarantined):
        await worker.serve()
    ledger = await control_of(backend).ledger("work")
    assert (ledger.in_flight, ledger.waiting + ledger.scheduled) == (0, 20)


async def test_it_keeps_house(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 10: without a server somebody has to."""
    monkeypatch.setattr(housekeeping, "_EVERY", 0.005)
    passes = asyncio.Event()
    backend = MemoryBackend()
    worker = LocalWorker(backend)

    async def maintain() -> Maintained:
        passes.set()
        return Maintained()

    monkeypatch.setattr(backend.control, "maintain", maintain)
    worker.task("work")(lambda: None)
    async with serving(worker):
        await asyncio.wait_for(passes.wait(), 5)


async def test_backends_that_will_not_do_are_refused() -> None:
    """Fault K4: at the start, with a clear word."""
    worker = LocalWorker("server")
    worker.task("work")(lambda: None)
    with pytest.raises(CapabilityMissing):
        await worker.serve()

    class Poor(MemoryBackend):
        capabilities = Capabilities()

    worker = LocalWorker(Poor())
    worker.task("work")(lambda: None)
    with pytest.raises(CapabilityMissing, match="dead_letters"):
        await worker.serve()
    with pytest.raises(ConfigurationError, match="no handlers"):
        await LocalWorker("memory").serve()


async def test_the_handlers_of_another_worker() -> None:
    """A program may choose where its work comes from when it starts."""
    remote = Worker(concurrency=3)
    done = asyncio.Event()

    @remote.task("work")
    async def act() -> None:
        done.set()

    backend = MemoryBackend()
    await publish(backend, None)
    worker = LocalWorker.of(remote)
    worker.configure(backend=backend)
    async with serving(worker):
        await asyncio.wait_for(done.wait(), 5)
        with pytest.raises(ConfigurationError, match="serving already"):
            worker.configure(concurrency=2)
        with pytest.raises(ConfigurationError, match="serving already"):
            await worker.serve()
        await ledger_when(backend, lambda ledger: ledger.done == 1)
    assert (await backend.health()).ok


async def test_prefetch_keeps_within_the_limits() -> None:
    """A large concurrency leaves less room to fetch ahead; an explicit one that is too large is refused."""
    LocalWorker(concurrency=10_000)
    worker = LocalWorker()
    worker.configure(concurrency=9_000)
    with pytest.raises(ConfigurationError):
        LocalWorker(concurrency=9_000, prefetch=2_000)
