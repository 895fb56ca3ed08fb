"""The queue for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, Literal, ParamSpec, Self, TypeVar

from taskqueue_core.application.dependencies import depends_on, override
from taskqueue_core.application.errors import NotConnected
from taskqueue_core.application.handler_scope import HANDLER_SCOPE
from taskqueue_core.application.registry import Tasks
from taskqueue_core.application.task_function import TaskFunction
from taskqueue_core.capabilities import schedules_of
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.hooks import Hooks
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.limits import duration
from taskqueue_core.loading import load_backend
from taskqueue_core.queue import Queue
from taskqueue_core.sync import SyncQueue
from taskqueue_worker.testing.calls import TestCalls, TestEnds, finish
from taskqueue_worker.testing.drain import Drain
from taskqueue_worker.testing.drained import Drained, check_name
from taskqueue_worker.testing.published import (
    PublishedTask,
    RecordingPublisher,
    call_text,
    check_arguments,
    matching,
    published_of,
    report,
)
from taskqueue_worker.testing.worker import DrainWorker

P = ParamSpec("P")
R = TypeVar("R")
_LIMIT = 10_000
"""maximum number of runs at one moment, by default"""
_MAX_NOTED = 10
"""maximum number of dead letters that are noted at an exception"""


class TestQueue:
    """A queue for tests of an application's tasks: a memory backend on a manual clock, and the real worker.

    Inside the ``with`` block, ``publish`` and ``publish_sync`` of the tasks of the registry ``tasks`` use this queue,
    also if the code under test opens a connection with ``tasks.connect`` or ``tasks.connect_sync``.
    Nothing runs by itself: `drain` runs what is due, and `advance` moves the clock. Handlers run one call at a time, in
    the order of the store; while a handler waits for the result of another task, the next one runs. Everything else is
    as in production: arguments are encoded and checked, and timeouts, retries, dead letters, ordering keys and limits
    apply, as the tasks declare them; retries have no jitter.

    ``mode="inline"`` drains within each publish of the code under test. What a handler publishes runs after it.
    ``errors="raise"`` makes a drain raise the exception of a handler, after everything has run; with
    ``errors="record"`` it is only in `Drained.errors`. ``start`` is the first time of the clock, in Unix seconds; by
    default the time of the system.

    Use it with ``with`` or ``async with``; in a test without an event loop, ``asyncio.run(taskqueue.drain())`` drains.
    Raises `ConfigurationError` for other values.

    >>> async with TestQueue(tasks) as taskqueue:
    ...     await place_order(17)
    ...     taskqueue.assert_published(charge, times=1, order=17)
    ...     drained = await taskqueue.drain()
    """

    __test__: ClassVar[bool] = False  # this is no test class for pytest

    def __init__(
        self,
        tasks: Tasks,
        *,
        mode: Literal["queue", "inline"] = "queue",
        errors: Literal["raise", "record"] = "raise",
        start: float | None = None,
    ) -> None:
        """Store the options. Nothing is opened before the ``with`` block."""
        if not isinstance(tasks, Tasks):
            raise ConfigurationError(
                f"TestQueue takes a registry of tasks, got a {type(tasks).__name__}: pass the Tasks object"
            )
        for name, value, allowed in (
            ("mode", mode, ("queue", "inline")),
            ("errors", errors, ("raise", "record")),
        ):
            if value not in allowed:
                raise ConfigurationError(f"{name}: got {value!r}; allowed: {', '.join(allowed)}")
        self._tasks = tasks
        self._mode = mode
        self._errors = errors
        self._clock = ManualClock(time.time() if start is None else start)
        self._calls = TestCalls()
        self._stack = ExitStack()
        self._opened: tuple[Queue, RecordingPublisher] | None = None
        self._running: tuple[DrainWorker, Drain] | None = None

    def __enter__(self) -> Self:
        backend = InstrumentedBackend(load_backend("memory", clock=self._clock), hooks := Hooks())
        publisher = RecordingPublisher(backend.publisher, self._before_publish, self._after_publish)
        backend.publisher = publisher
        hooks.register(publisher)
        queue = Queue(backend)
        queue.ends = TestEnds(backend.control, self._calls, lambda: self._running is not None)
        with ExitStack() as stack:
            stack.callback(lambda: finish(backend.aclose()))
            stack.enter_context(self._tasks.replaced_by(queue, SyncQueue(queue, self._calls)))
            self._opened = queue, publisher
            self._calls.loop = asyncio._get_running_loop()  # noqa: SLF001 - get_running_loop raises an error without a loop
            self._applied = 0
            finish(self._apply())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened = None
        self._stack.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)

    @property
    def queue(self) -> Queue:
        """The queue itself: for the ledger, the settings, and tasks that are published by their key.

        >>> (await taskqueue.queue.ledger()).dead
        0
        """
        return self._open()[0]

    @property
    def now(self) -> float:
        """The time of the clock, in Unix seconds. Only `advance` changes it."""
        return self._clock.now()

    async def drain(
        self, *, until_idle: bool = True, deliver_twice: bool = False, limit: int = _LIMIT
    ) -> Drained:
        """Run the tasks that are due, and those that they publish, until nothing is due any more.

        ``until_idle=False`` runs only what is due now. ``deliver_twice=True`` runs each task a second time after it
        succeeded and before its ack, as if the worker had crashed in between: a test that a handler is idempotent.

        Raises the exception of the first handler that failed, unless ``errors="record"``. Raises `NotIdle` if more than
        ``limit`` runs were due, or a handler waits for a task that is not due.

        >>> (await taskqueue.drain()).count(end="done")
        1
        """
        return await self._drain(until_idle=until_idle, deliver_twice=deliver_twice, limit=limit)

    async def advance(self, seconds: float | timedelta) -> Drained:
        """Run the tasks that are due, and move the clock forward; run what falls due on the way, at its time.

        ``seconds`` may be a timedelta. What falls due are delayed tasks and retries, and instants of schedules; tasks
        whose deadlines pass expire. Raises what `drain` raises, where the limit is 10,000 runs at one moment, and
        `InvalidInput`.

        >>> (await taskqueue.advance(24 * 3600)).count("shop.remind")
        1
        """
        until = self._clock.now() + duration("seconds", seconds)
        return await self._drain(until=until, limit=_LIMIT)

    async def crash(self) -> None:
        """Let the worker of the running drain vanish with its tasks, and return when the drain has ended.

        Each of them counts as lost, and runs again in the next drain. Async handlers are cancelled; a function in a
        thread runs on, but its outcome is ignored. Inside a handler, this call does not return. Has no effect if no
        drain is running.

        >>> draining = asyncio.create_task(taskqueue.drain())
        >>> await started.wait()
        True
        >>> await taskqueue.crash()
        >>> (await draining).count(end="done")
        0
        """
        if self._running is not None:
            worker, drain = self._running
            await worker.crash()
            await drain.ended.wait()

    def published(self, task: TaskFunction[P, R, Any], /) -> list[PublishedTask[R]]:
        """Return the published tasks of a function, in order. Tasks that the store refused are not among them.

        Raises `InvalidInput` for a task of a registry that this queue does not have.

        >>> [each.arguments["order"] for each in taskqueue.published(charge)]
        [17]
        """
        queue, publisher = self._open()
        check_name(task.name, self._tasks.functions)
        return published_of(task, publisher.accepted, queue)

    def assert_published(
        self, task: TaskFunction[..., Any], /, times: int | None = None, **arguments: Any
    ) -> None:
        """Fail unless the task was published with these arguments: ``times`` times, or at least once.

        Arguments that are not named may have any value. The message lists what was published, and the difference to
        the most similar task. Raises `InvalidArguments` for a name that is not a parameter of the task, and what
        `published` raises.

        >>> taskqueue.assert_published(charge, times=1, order=17)
        """
        __tracebackhide__ = True
        published = self.published(task)
        check_arguments(task, arguments)
        found = len(matching(published, arguments))
        if found != times if times is not None else not found:
            expected = {None: "at least once", 1: "once"}.get(times, f"{times} times")
            raise AssertionError(
                report(
                    f"expected {call_text(task.name, arguments)} {expected}, found {found}",
                    self._open()[1].accepted,
                    self._tasks.functions,
                    published,
                    arguments,
                )
            )

    def assert_not_published(self, task: TaskFunction[..., Any], /, **arguments: Any) -> None:
        """Fail if the task was published with these arguments; without arguments, if it was published at all.

        >>> taskqueue.assert_not_published(refund, order=17)
        """
        __tracebackhide__ = True
        self.assert_published(task, 0, **arguments)

    def override(
        self, dependency: Callable[..., Any], fake: object
    ) -> AbstractContextManager[None]:
        """Replace a dependency until the end of the block.

        ``fake`` is a function or a class, which is called instead of ``dependency``, or else the value itself. Raises
        `ConfigurationError` if it cannot be called, needs what it replaces, or no task depends on ``dependency``.

        >>> with taskqueue.override(session, FakeSession()):
        ...     drained = await taskqueue.drain()
        """
        if not any(
            depends_on(each.function, dependency) for each in self._tasks.functions.values()
        ):
            name = getattr(dependency, "__qualname__", repr(dependency))
            raise ConfigurationError(
                f"override: no task of this TestQueue depends on {name}: pass the function that is in Depends(...) or "
                "Shared(...)"
            )
        return override(dependency, fake)

    def _open(self) -> tuple[Queue, RecordingPublisher]:
        if self._opened is None:
            raise NotConnected("the TestQueue is not open: write 'async with TestQueue(tasks)'")
        return self._opened

    async def _drain(self, **options: Any) -> Drained:
        queue, publisher = self._open()
        if HANDLER_SCOPE.get() is not None:
            raise TaskQueueError(
                "a handler cannot drain the queue: tasks that it publishes run after it"
            )
        self._calls.check_wait()
        while self._running is not None:
            await self._running[1].ended.wait()
        await self._apply()
        drain = Drain(
            self._clock,
            publisher.deadlines,
            schedules_of(queue.backend),
            names=frozenset(self._tasks.functions),
            **options,
        )
        worker = DrainWorker(self._tasks, queue.backend, drain)
        self._running = worker, drain
        self._calls.loop = asyncio.get_running_loop()
        try:
            await worker.serve()
        finally:
            self._running = None
            drain.ended.set()
        drained = drain.result()
        if self._errors == "raise" and drained.errors:
            first, *others = drained.errors
            for run in drained.dead[:_MAX_NOTED]:
                reason = run.dead.reason if run.dead else ""
                first.add_note(f"task {run.id} of {run.task} is a dead letter now: {reason}")
            if others:
                first.add_note(
                    f"{len(others)} more runs failed: see Drained.errors of a TestQueue with errors='record'"
                )
            raise first
        return drained

    def _drains_inline(self) -> bool:
        return self._mode == "inline" and HANDLER_SCOPE.get() is None

    async def _apply(self) -> None:
        """Apply the declarations, unless that was done; a test may declare further tasks and schedules."""
        number = len(self._tasks.functions) + len(self._tasks.schedules)
        if number != self._applied:
            self._applied = number
            await self._tasks.apply()

    async def _before_publish(self) -> None:
        await self._apply()
        if self._drains_inline():
            self._calls.check_wait()

    async def _after_publish(self) -> None:
        if self._drains_inline():
            await self._drain(limit=_LIMIT)
