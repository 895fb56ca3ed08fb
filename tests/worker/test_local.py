"""A worker with direct access to a backend: the same outcomes as over a socket, settled in batches."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Annotated

import pytest
from pydantic import AfterValidator

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import QueueSettings, control_of, dead_letters_of
from taskqueue_core.capabilities.control import Maintained
from taskqueue_core.consumer import maintenance
from taskqueue_core.errors import CapabilityMissing, ConfigurationError
from taskqueue_core.queue import Queue
from taskqueue_core.retry import RetryPolicy
from taskqueue_memory import MemoryBackend
from taskqueue_worker import Context, LocalWorker, Reject, Retry, Worker
from taskqueue_worker.local_source import LocalTaskSource
from taskqueue_worker.run import WorkerRun
from tests.server.flaky import Flaky
from tests.worker.local import ledger_when, publish, serving, status, until


async def test_tasks_of_every_kind_are_executed_and_acked() -> None:
    """D5, A17: coroutines run in the event loop and functions in threads, and results are stored with the ack."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend, concurrency=7)
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
    """REV-E1: each kind of outcome ends in its own state, with the same error text as in a websocket worker."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)
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


Checked = Annotated[int, AfterValidator(lambda n: {1: n}[n])]


@pytest.mark.parametrize("batch", [None, 3])
async def test_a_payload_that_cannot_be_checked_fails_its_attempt(batch: int | None) -> None:
    """Fault F20: an exception in the validator of a parameter type fails only this attempt.

    The worker continues.
    """
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)

    async def one(n: Checked) -> None:
        """Do nothing."""

    async def many(n: list[Checked]) -> None:
        """Do nothing."""

    worker.task("work", batch=batch)(one if batch is None else many)
    bad, _ = await publish(backend, 2, 1)
    async with serving(worker):
        await ledger_when(backend, lambda ledger: (ledger.scheduled, ledger.done) == (1, 1))
    assert (await status(backend, bad)).error == "KeyError: 2"


async def test_settings_are_read_for_each_batch_of_outcomes() -> None:
    """Law 9: a failed task is handled by the retry policy that is in force at this moment."""
    backend = MemoryBackend()
    control = control_of(backend)
    worker = LocalWorker(backend=backend)

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
    """If a task is cancelled in the store, its coroutine is cancelled and its slot becomes free."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend, concurrency=1)
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
    """Progress that a thread reports appears in the status of the task."""
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)
    go_on = threading.Event()

    @worker.task("work")
    def half(context: Context) -> None:
        context.progress(0.5)
        assert go_on.wait(30)

    (one,) = await publish(backend, None)
    async with serving(worker):
        async with asyncio.timeout(30):
            while (await status(backend, one)).progress != 0.5:  # noqa: ASYNC110 - no event signals the change
                await asyncio.sleep(0.001)
        go_on.set()
        await ledger_when(backend, lambda ledger: ledger.done == 1)


async def test_progress_without_control_is_not_kept() -> None:
    """Without the capability ``control``, reported progress is dropped and uses no memory."""

    class Poor(MemoryBackend):
        capabilities = Capabilities(names=frozenset({Capability.DEAD_LETTERS}))

    backend = Poor()
    worker = LocalWorker(backend=backend)
    runs = 0

    @worker.task("work")
    async def act(context: Context) -> None:
        nonlocal runs
        context.progress(0.5)
        runs += 1

    await publish(backend, *[None] * 50)
    async with serving(worker):
        await until(lambda: runs == 50)
        await asyncio.sleep(0.01)
        assert isinstance(worker._current_run, WorkerRun)
        assert isinstance(worker._current_run._source, LocalTaskSource)
        assert not worker._current_run._source._progress


@pytest.mark.fast_clock
async def test_acks_are_gathered_and_a_lone_one_goes_at_once() -> None:
    """A single outcome is settled at once; outcomes that follow during a settlement are settled together."""
    backend = Flaky(slowness=0.02)
    worker = LocalWorker(backend=backend, concurrency=200, prefetch=0)

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
    """D16: a worker prefetches only tasks that it can start soon.

    While tasks are slow, it holds no more than it runs, and releases prefetched ones.
    """
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend, concurrency=10)
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


async def test_it_runs_maintenance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 10: without a server, the worker runs maintenance."""
    monkeypatch.setattr(maintenance, "_EVERY", 0.005)
    passes = asyncio.Event()
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)

    async def maintain() -> Maintained:
        passes.set()
        return Maintained()

    monkeypatch.setattr(backend.control, "maintain", maintain)
    worker.task("work")(lambda: None)
    async with serving(worker):
        await asyncio.wait_for(passes.wait(), 30)


async def test_backends_that_will_not_do_are_refused() -> None:
    """Fault K4: a backend without the required capabilities is refused at the start, with a clear error."""
    worker = LocalWorker(backend="server")
    worker.task("work")(lambda: None)
    with pytest.raises(CapabilityMissing):
        await worker.serve()

    class Poor(MemoryBackend):
        capabilities = Capabilities()

    worker = LocalWorker(backend=Poor())
    worker.task("work")(lambda: None)
    with pytest.raises(CapabilityMissing, match="dead_letters"):
        await worker.serve()
    with pytest.raises(ConfigurationError, match="no handlers"):
        await LocalWorker(backend="memory").serve()


async def test_the_handlers_of_another_worker() -> None:
    """A local worker can run the handlers of another worker, for example one that is defined for a server."""
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
        await asyncio.wait_for(done.wait(), 30)
        with pytest.raises(ConfigurationError, match="already running"):
            worker.configure(concurrency=2)
        with pytest.raises(ConfigurationError, match="already running"):
            await worker.serve()
        await ledger_when(backend, lambda ledger: ledger.done == 1)
    assert (await backend.health()).ok


async def test_prefetch_keeps_within_the_limits() -> None:
    """With a large concurrency, the default prefetch is reduced to stay within the credit limit.

    An explicit prefetch that exceeds the limit is refused.
    """
    LocalWorker(concurrency=10_000)
    worker = LocalWorker()
    worker.configure(concurrency=9_000)
    for prefetch in (2_000, -1):
        with pytest.raises(ConfigurationError, match="prefetch at least 0"):
            LocalWorker(concurrency=9_000, prefetch=prefetch)
    with pytest.raises(ConfigurationError):
        worker.configure(concurrency=0)
    assert (worker._concurrency, worker._prefetch) == (9_000, 1_000)


def test_a_worker_runs_without_signal_handlers_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """U30: run works with an event loop that has no signal handlers, as on Windows; SIGTERM ends it."""

    def missing(*_: object) -> None:
        raise NotImplementedError  # as the event loop of Windows does

    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", missing)
    before = signal.getsignal(signal.SIGTERM)
    backend = MemoryBackend()
    worker = LocalWorker(backend=backend)

    @worker.task("work")
    async def stop() -> None:
        signal.raise_signal(signal.SIGTERM)

    asyncio.run(Queue(backend).publish("work", {}, id="one"))
    worker.run()
    assert asyncio.run(backend.control.ledger("work")).done == 1
    assert signal.getsignal(signal.SIGTERM) is before
