"""The rules of a task that say what exceptions mean."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskqueue_core import Context, Queue, Reject, Retry, Snooze, TaskDead, Tasks
from taskqueue_core.application.rules import Rule
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import dead_letters_of
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.protocol.frames import RetryFrame
from taskqueue_core.tasks import DeadLetter, State, TaskStatus
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker, Worker
from tests.application.running import working
from tests.worker.fake import PATIENCE, FakeServer, running, work
from tests.worker.local import ledger_when, publish, serving, status


class Limited(ConnectionError):
    """The other side asks to wait."""

    seconds = 60.0


def broken(error: object, context: object) -> None:
    """Raise an error instead of deciding."""
    raise RuntimeError(f"no rule for {type(error).__name__}, {type(context).__name__}")


def patient(error: Limited, context: Context) -> Retry | Snooze | None:
    """Decide by the exception and the context."""
    if context.failures:
        return None
    return Snooze(error.seconds)


RULES: dict[type[Exception], Any] = {
    ConnectionError: Retry(30),
    Limited: patient,
    ValueError: Reject("bad_input"),
    UnicodeError: Retry(5, "try again"),
    LookupError: broken,
    KeyError: lambda _error, _context: None,
    OSError: lambda _error, _context: "soon",
}


@asynccontextmanager
async def failing(error: Exception) -> AsyncIterator[tuple[Backend, str]]:
    """Run a task whose handler raises an error, until the attempt has ended; yield the backend and the task's id."""
    tasks = Tasks()

    @tasks.task("work", on_error=RULES)
    async def work() -> None:
        raise error

    backend = MemoryBackend()
    (task_id,) = await publish(backend, {})
    async with serving(LocalWorker(tasks, backend=backend)):
        await ledger_when(backend, lambda ledger: ledger.scheduled + ledger.dead)
    yield backend, task_id
    await backend.aclose()


async def after(error: Exception) -> TaskStatus:
    """Return the status of a task after an attempt that raised an error."""
    async with failing(error) as (backend, task_id):
        return await status(backend, task_id)


async def test_the_most_specific_class_decides() -> None:
    """A rule of a class holds for its subclasses, unless one of them has a rule of its own (U5)."""
    reset = await after(ConnectionResetError("gone"))
    assert (reset.state, reset.attempt) == (State.SCHEDULED, 2)
    assert reset.error == "ConnectionResetError: gone", (
        "the failure keeps the text of its exception"
    )
    assert reset.last_failure is not None
    assert "ConnectionResetError: gone" in (reset.last_failure.traceback or "")
    limited = await after(Limited("slow down"))
    assert (limited.state, limited.attempt, limited.last_failure) == (State.SCHEDULED, 2, None)
    encoded = await after(UnicodeError("odd"))
    assert (encoded.state, encoded.error) == (State.SCHEDULED, "try again")


async def test_a_rejection_keeps_the_error() -> None:
    """A rule that rejects makes a dead letter with its reason, and the exception's error and traceback (U5)."""
    async with failing(ValueError("no such host")) as (backend, task_id):
        letter: DeadLetter | None = await dead_letters_of(backend).get("work", task_id)
    assert letter is not None
    assert letter.reason == "bad_input"
    (failure,) = letter.history
    assert failure.error == "ValueError: no such host"
    assert "raise error" in (failure.traceback or "")


async def test_no_rule_means_the_policy() -> None:
    """An exception without a rule, or whose rule decides nothing, is a failure by the retry policy (U5)."""
    for error in (ZeroDivisionError("x"), KeyError("x")):
        found = await after(error)
        assert found.state is State.SCHEDULED
        assert found.error == f"{type(error).__name__}: {error}"


async def test_a_rule_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """A rule that raises an exception, or returns something else, fails the attempt, and the log says so (U5)."""
    caplog.set_level(logging.WARNING, "taskqueue.worker")
    found = await after(IndexError("first"))
    assert found.error == "RuntimeError: no rule for IndexError, Context"
    assert found.last_failure is not None
    assert "IndexError: first" in (found.last_failure.traceback or ""), "the cause must show"
    assert any(record.exc_info and record.exc_info[0] is RuntimeError for record in caplog.records)
    found = await after(OSError("first"))
    assert found.error is not None
    assert found.error.startswith("TypeError: a rule of on_error returned a str; expected Retry")


async def test_what_a_handler_raises_needs_no_rule() -> None:
    """A handler that raises `Retry`, `Reject` or `Snooze` decides itself, whatever the rules say (U5)."""
    tasks = Tasks()

    @tasks.task("work", on_error={Exception: Reject("never")})
    async def work() -> None:
        raise Snooze(60)

    backend = MemoryBackend()
    await publish(backend, {})
    async with serving(LocalWorker(tasks, backend=backend)):
        await ledger_when(backend, lambda ledger: ledger.scheduled)
    await backend.aclose()


@pytest.mark.parametrize("sync", [True, False])
async def test_rules_for_the_timeout(
    server: FakeServer, caplog: pytest.LogCaptureFixture, *, sync: bool
) -> None:
    """The timeout of an attempt is a ``TimeoutError`` for the rules, also of its bases, and the log says it (U5)."""
    caplog.set_level(logging.INFO, "taskqueue.worker")
    tasks = Tasks()
    seen: list[tuple[str, int]] = []
    gate = threading.Event()

    def decide(error: TimeoutError, context: Context) -> Rule | None:
        seen.append((str(error), context.attempt))
        return (Snooze(60), Retry(5), None)[context.attempt - 1]

    def wait() -> None:
        assert gate.wait(PATIENCE)

    async def sleep() -> None:
        await asyncio.sleep(PATIENCE)

    tasks.task("work", timeout=0.01, on_error={OSError: decide})(wait if sync else sleep)
    async with running(Worker(tasks, url=server.url, concurrency=3)):
        peer = await server.welcomed()
        frames = []
        for attempt in (1, 2, 3):
            await peer.deliver(work(attempt=attempt))
            frames.append(await peer.next(RetryFrame))
        gate.set()
    assert [each.delay for each in frames] == [60, 5, None]
    assert [each.error for each in frames[1:]] == ["timeout after 0.01 s"] * 2
    assert seen == [("timeout after 0.01 s", attempt) for attempt in (1, 2, 3)]
    mine = [each for each in caplog.records if vars(each).get("task_id")]
    assert ["put off" in mine[0].message, "asks for a retry" in mine[1].message] == [True, True]
    assert mine[2].exc_info is not None
    assert mine[2].exc_info[0] is TimeoutError


async def test_a_rule_that_fails_at_the_timeout() -> None:
    """A rule that raises an exception at the timeout fails the attempt; ``SystemExit`` ends the worker, too (U5)."""
    tasks = Tasks()

    def end(error: TimeoutError, _context: Context) -> None:
        raise SystemExit(str(error))

    @tasks.task("broken", timeout=0.01, on_error={TimeoutError: broken})
    async def fail() -> None:
        await asyncio.sleep(PATIENCE)

    @tasks.task("ending", timeout=0.05, on_error={TimeoutError: end})
    async def end_the_worker() -> None:
        await asyncio.sleep(PATIENCE)

    backend = MemoryBackend()
    queue = Queue(backend)
    handles = [await each.using(on=queue).publish() for each in (fail, end_the_worker)]
    with pytest.raises(SystemExit, match="timeout after"):
        await LocalWorker(tasks, backend=backend).serve()
    found = [await each.status() for each in handles]
    assert [each and each.error for each in found] == [
        "RuntimeError: no rule for TimeoutError, Context",
        "timeout after 0.05 s",
    ]
    await backend.aclose()


async def test_rules_in_a_batch() -> None:
    """The rules decide for each task of a batch, also for exceptions in the list of results (U5)."""
    tasks = Tasks()

    @tasks.task("work", batch=3, on_error=RULES)
    async def work(numbers: list[int]) -> list[object]:
        ends: dict[int, object] = {1: ValueError("bad"), 2: ConnectionError("gone"), 3: "done"}
        return [ends[number] for number in numbers]

    backend = MemoryBackend()
    await publish(backend, 1, 2, 3)
    async with serving(LocalWorker(tasks, backend=backend)):
        await ledger_when(
            backend, lambda ledger: (ledger.dead, ledger.scheduled, ledger.done) == (1, 1, 1)
        )
    await backend.aclose()


async def decide(_error: Exception, _context: Context) -> None:
    """Decide nothing, too late."""


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([], "on_error: got a list; expected a dict of rules by class"),
        ({"ValueError": Retry()}, "'ValueError' is not a class of exceptions"),
        ({BaseException: Retry()}, "is not a class of exceptions"),
        ({Retry: Reject("x")}, "a handler that raises Retry needs no rule"),
        ({ValueError: Retry}, "is the class Retry; write an instance"),
        ({ValueError: "retry"}, "the rule for ValueError is a str; expected Retry"),
        ({ValueError: decide}, "must not be async"),
        ({ValueError: lambda error: None}, "a function of two arguments"),  # noqa: ARG005
    ],
)
def test_wrong_rules(rules: Any, said: str) -> None:
    """A wrong rule is an error at the declaration, which says what to write (U5)."""
    with pytest.raises(ConfigurationError, match=said):
        Tasks().task("work", on_error=rules)
    with pytest.raises(ConfigurationError, match=said):
        LocalWorker(backend=MemoryBackend()).task("work", on_error=rules)(print)


@pytest.mark.parametrize("wrong", [asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_a_rule_that_raises_no_exception_of_python(
    kind: str, wrong: type[BaseException]
) -> None:
    """U5: whatever an error rule raises, the call ends, its slot is free, and the attempt failed."""
    tasks = Tasks()

    def rule(_error: Exception, _context: Context) -> None:
        raise wrong

    def fail() -> None:
        raise ValueError("v")

    async def fail_in_the_loop() -> None:
        fail()

    function = fail if kind == "thread" else fail_in_the_loop
    task = tasks.task("fail", on_error={ValueError: rule}, retry=1)(function)
    backend = MemoryBackend()
    async with (
        tasks.connect(Queue(backend)),
        working(LocalWorker(tasks, backend=backend, concurrency=1)),
    ):
        for _ in range(2):
            with pytest.raises(TaskDead, match=wrong.__name__):
                await (await task.publish()).result(PATIENCE)


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_logging_that_fails(kind: str) -> None:
    """U10: what the application's logging raises changes no outcome, and a call ends."""
    tasks = Tasks()

    def fail(number: int) -> None:
        if number == 1:
            raise Reject("no")
        raise ValueError("v")

    async def fail_in_the_loop(number: int) -> None:
        fail(number)

    task = tasks.task("fail", retry=1)(fail if kind == "thread" else fail_in_the_loop)

    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError(record.msg)

    broken, log, backend = Broken(), logging.getLogger("taskqueue.worker"), MemoryBackend()
    async with (
        tasks.connect(Queue(backend)),
        working(LocalWorker(tasks, backend=backend, concurrency=1)),
    ):
        log.addFilter(broken)
        try:
            for number, reason in ((1, "no"), (2, "ValueError: v")):
                with pytest.raises(TaskDead, match=reason):
                    await (await task.publish(number)).result(PATIENCE)
        finally:
            log.removeFilter(broken)
