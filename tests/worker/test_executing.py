"""Executing a task in a worker, and settling it with exactly one frame."""

from __future__ import annotations

import asyncio
import threading
import time

import msgspec
import pytest

from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import (
    AckFrame,
    Credit,
    DeadLetterFrame,
    Progress,
    RedeliverFrame,
    RetryFrame,
    Revoke,
)
from taskqueue_worker import Context, Reject, Worker
from taskqueue_worker import Retry as Again
from tests.worker.fake import PATIENCE, FakeServer, running, work
from tests.worker.local import until


async def test_ack_comes_after_execution_and_carries_the_result(server: FakeServer) -> None:
    """REV-E1, D5: a task is acked only after its handler has returned, and the ack contains the result."""
    worker = Worker(url=server.url)
    gate = threading.Event()

    @worker.task("work")
    def wait(n: int) -> dict[str, int]:
        assert gate.wait(30)
        return {"n": n + 1}

    async with running(worker):
        peer = await server.welcomed()
        assert peer.hello.keys == ["work"]
        assert peer.hello.credit == 10
        task = work({"n": 1})
        await peer.deliver(task)
        await peer.deliver(work("not a number"))
        assert (await peer.next(DeadLetterFrame)).reason == "invalid_payload"
        assert peer.count(AckFrame) == 0
        gate.set()
        ack = await peer.next(AckFrame)
        assert ack.receipts == [task.receipt]
        assert msgspec.json.decode(ack.results[task.receipt]) == {"n": 2}


@pytest.mark.parametrize("sync", [True, False])
async def test_each_outcome_has_its_verb(server: FakeServer, *, sync: bool) -> None:
    """REV-E1: each kind of outcome is sent as its own frame; an error is sent as "Type: message"."""
    worker = Worker(url=server.url)
    cases: dict[str, object] = {
        "retry": Again(delay=5, error="later"),
        "returned": "returned",
        "reject": Reject("bad", "because"),
        "error": ValueError("wrong"),
    }

    def act(case: str) -> object:
        found = cases[case]
        if isinstance(found, BaseException):
            raise found
        return Again()

    if sync:
        worker.task("work")(act)
    else:

        @worker.task("work")
        async def act_async(case: str) -> object:
            return act(case)

    async with running(worker):
        peer = await server.welcomed()
        tasks = {case: work(case) for case in cases}
        await peer.deliver(*tasks.values())
        retries = {(frame := await peer.next(RetryFrame)).receipt: frame for _ in range(3)}
        by_case = {case: retries.get(task.receipt) for case, task in tasks.items()}
        assert by_case["retry"] == RetryFrame(
            receipt=tasks["retry"].receipt, error="later", delay=5
        )
        assert by_case["returned"] == RetryFrame(
            receipt=tasks["returned"].receipt, error="retry requested"
        )
        assert by_case["error"] == RetryFrame(
            receipt=tasks["error"].receipt, error="ValueError: wrong"
        )
        assert await peer.next(DeadLetterFrame) == DeadLetterFrame(
            receipt=tasks["reject"].receipt, reason="bad", error="because"
        )
        assert peer.count(AckFrame) == 0


@pytest.mark.parametrize(
    "value", [object(), {1j}, "x" * LIMITS.result], ids=("object", "complex", "long")
)
async def test_a_result_that_cannot_be_stored_is_a_dead_letter(
    server: FakeServer, value: object
) -> None:
    """A result that cannot be stored makes the task a dead letter, because a retry would give the same result."""
    worker = Worker(url=server.url)

    @worker.task("work")
    async def give() -> object:
        return value

    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(work())
        frame = await peer.next(DeadLetterFrame)
        assert frame.reason == "invalid_result"
        assert "xxx" not in (frame.error or "")


async def test_an_invalid_payload_names_fields_and_no_values(server: FakeServer) -> None:
    """A task with an invalid payload becomes a dead letter without a call of the handler.

    The error names the fields but contains no values.
    """
    worker = Worker(url=server.url)
    calls = []

    @worker.task("work")
    async def act(count: int, *, name: str) -> None:
        calls.append((count, name))

    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(work({"count": "secret", "extra": "secret"}))
        frame = await peer.next(DeadLetterFrame)
        assert frame.reason == "invalid_payload"
        assert (
            frame.error
            == "count should be a valid integer, unable to parse string as an integer; name is missing; "
            "extra is not a parameter"
        )
        await peer.deliver(work({"count": 1, "name": "a"}))
        await peer.next(AckFrame)
        assert calls == [(1, "a")]


async def test_a_task_of_an_unknown_key_is_put_off(server: FakeServer) -> None:
    """Fault A14: a task with a key that the worker does not know is not executed and costs no attempt."""
    worker = Worker(url=server.url)
    worker.task("work")(lambda: None)
    async with running(worker):
        peer = await server.accept()
        await peer.welcome(features=["snooze"])
        task = work(key="os.system")
        await peer.deliver(task)
        frame = await peer.next(RetryFrame)
        assert (frame.receipt, frame.delay, frame.free) == (task.receipt, 30, True)
        assert peer.settled() == [task.receipt]


async def test_never_more_than_the_concurrency_at_once(server: FakeServer) -> None:
    """A26: no more tasks than the concurrency run at once; up to ``prefetch`` more wait in the worker.

    Deliveries beyond the credit are released.
    """
    worker = Worker(url=server.url, concurrency=3, prefetch=2)
    gate = threading.Event()
    entered = threading.Semaphore(0)
    inside: set[int] = set()
    most = []

    @worker.task("work")
    def wait(n: int) -> None:
        inside.add(n)
        most.append(len(inside))
        entered.release()
        assert gate.wait(30)
        inside.remove(n)

    async with running(worker):
        peer = await server.welcomed()
        assert peer.hello.credit == 5
        tasks = [work(n) for n in range(7)]
        await peer.deliver(*tasks)
        assert (await peer.next(RedeliverFrame)).receipts == [task.receipt for task in tasks[5:]]
        for _ in range(3):
            assert await asyncio.to_thread(entered.acquire, timeout=30)
        gate.set()
        done: list[str] = []
        while len(done) < 5:
            done += (await peer.next(AckFrame)).receipts
        assert sorted(done) == sorted(task.receipt for task in tasks[:5])
        assert max(most) == 3


async def test_the_timeout_of_a_delivery_decides(server: FakeServer) -> None:
    """U3: a worker offers the feature, and a delivery's timeout comes before the one that its handler declares.

    Without one, as an older server sends it, the declared timeout ends the attempt.
    """
    worker = Worker(url=server.url, concurrency=2)

    @worker.task("work", timeout=0.02)
    async def sleep(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async with running(worker):
        peer = await server.welcomed()
        assert "timeouts" in peer.hello.features
        await peer.deliver(long := work(0.1, timeout=60))
        assert (await peer.next(AckFrame)).receipts == [long.receipt]
        for timeout, said in ((0.01, "0.01"), (None, "0.02")):
            await peer.deliver(work(60, timeout=timeout))
            assert (await peer.next(RetryFrame)).error == f"timeout after {said} s"


@pytest.mark.parametrize("sync", [True, False])
async def test_a_timeout_fails_the_attempt(server: FakeServer, *, sync: bool) -> None:
    """A task that exceeds its timeout is retried.

    A coroutine is cancelled; a thread keeps its slot until it ends, and its result is discarded.
    """
    worker = Worker(url=server.url, concurrency=1)
    gate = threading.Event()
    seen = []

    if sync:

        @worker.task("work", timeout=0.05)
        def wait(context: Context) -> str:
            assert gate.wait(30)
            seen.append(context.revoked)
            return "too late"
    else:

        @worker.task("work", timeout=0.05)
        async def sleep(context: Context) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                seen.append(context.revoked)

    async with running(worker):
        peer = await server.welcomed()
        task = work()
        await peer.deliver(task)
        assert (await peer.next(RetryFrame)).error == "timeout after 0.05 s"
        if sync:
            assert peer.count(Credit) == 0
            gate.set()
        assert (await peer.next(Credit)).n == 1
        assert seen == [True]
        assert peer.settled() == [task.receipt]


async def test_progress_from_a_coroutine_and_from_a_thread(server: FakeServer) -> None:
    """Progress can be reported from a coroutine and from a thread, and is sent at once."""
    worker = Worker(url=server.url)
    gate = threading.Event()

    @worker.task("async")
    async def one(context: Context) -> None:
        context.progress(0.5)
        await until(gate.is_set)
        gate.clear()

    @worker.task("sync")
    def two(n: int, context: Context) -> str:
        context.progress("half" + "!" * 5000)
        assert gate.wait(30)
        return f"{context.key} {context.task_id} {context.attempt} {context.losses} {n}"

    async with running(worker):
        peer = await server.welcomed()
        first, second = work(key="async"), work({"n": 7}, key="sync", attempt=3)
        await peer.deliver(first)
        assert (await peer.next(Progress)).value == 0.5
        gate.set()
        assert (await peer.next(AckFrame)).receipts == [first.receipt]
        await peer.deliver(second)
        assert (await peer.next(Progress)).value == "half" + "!" * (LIMITS.text - 4)
        gate.set()
        text = (await peer.next(AckFrame)).results[second.receipt]
        assert msgspec.json.decode(text) == f"sync {second.task.id} 3 0 7"


async def test_a_revoked_task_is_stopped_and_not_settled(server: FakeServer) -> None:
    """Fault F21: a revoked task is cancelled, or its result is discarded.

    It is not settled, and its slot becomes free.
    """
    worker = Worker(url=server.url, concurrency=2)
    gate = threading.Event()
    started = threading.Semaphore(0)
    cancelled = threading.Event()
    flags = []

    @worker.task("async")
    async def sleep() -> None:
        started.release()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    @worker.task("sync")
    def wait(context: Context) -> str:
        started.release()
        assert gate.wait(30)
        flags.append(context.revoked)
        return "nobody wants it"

    async with running(worker):
        peer = await server.welcomed()
        tasks = [work(key="async"), work(key="sync")]
        await peer.deliver(*tasks)
        for _ in tasks:
            assert await asyncio.to_thread(started.acquire, timeout=30)
        await peer.send(Revoke(receipts=[task.receipt for task in tasks]))
        assert await asyncio.to_thread(cancelled.wait, 30)
        gate.set()
        credit = 0
        while credit < 2:
            credit += (await peer.next(Credit)).n
        assert flags == [True]
        assert peer.settled() == []


async def test_outcomes_are_batched_under_load(server: FakeServer) -> None:
    """Under load, acks of many tasks share a frame, and each task is acked once."""
    worker = Worker(url=server.url, concurrency=1000)
    worker.task("work")(_nothing)
    async with running(worker):
        peer = await server.welcomed()
        tasks = [work() for _ in range(1000)]
        for start in range(0, 1000, 250):
            await peer.deliver(*tasks[start : start + 250])
        done: list[str] = []
        while len(done) < len(tasks):
            done += (await peer.next(AckFrame)).receipts
        assert sorted(done) == sorted(task.receipt for task in tasks)
        assert peer.count(AckFrame) < len(tasks) / 2


async def _nothing() -> None:
    """Do nothing."""


async def test_logs_say_what_failed_and_no_payload(
    server: FakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault K1: if so configured, the log has the type and place of an error, but not its text.

    The text, which may quote the payload, is sent to the server only. Why a payload is invalid is never logged.
    """
    monkeypatch.setenv("TASKQUEUE_LOG_ERRORS", "frames")
    worker = Worker(url=server.url)

    @worker.task("work")
    def fail(password: str) -> None:
        raise ValueError(password)

    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(work({"password": "hunter2"}), work({"passwort": "hunter2"}))
        assert (await peer.next(RetryFrame)).error == "ValueError: hunter2"
        await peer.next(DeadLetterFrame)
    assert "ValueError" in caplog.text
    assert "in fail" in caplog.text
    assert "hunter2" not in caplog.text


async def test_a_lone_outcome_does_not_wait(server: FakeServer) -> None:
    """A single task is acked within milliseconds, without a delay for batching."""
    worker = Worker(url=server.url)
    worker.task("work")(_nothing)
    async with running(worker):
        peer = await server.welcomed()
        fastest = 1.0
        async with asyncio.timeout(PATIENCE):
            while fastest >= 0.02:
                began = time.perf_counter()
                await peer.deliver(work())
                await peer.next(AckFrame)
                fastest = min(fastest, time.perf_counter() - began)
