"""The base class of workers: registering handlers, options, signals and stopping."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar, overload

import msgspec

from taskqueue_core.application.declared_schedules import DeclaredSchedules
from taskqueue_core.application.policies import declared_settings
from taskqueue_core.application.registry import Tasks
from taskqueue_core.application.rules import ErrorRules
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import LIMITS, check_duration, check_name
from taskqueue_core.queue import Queue
from taskqueue_worker.child_processes import ChildProcesses, begin_of
from taskqueue_worker.declarations import Declared
from taskqueue_worker.handlers import Handler, Handlers
from taskqueue_worker.process_end import run_process, stopped_by_signals
from taskqueue_worker.quarantine import Quarantine
from taskqueue_worker.report import WorkerReport, outcome_name
from taskqueue_worker.run import TaskSource, WorkerRun
from taskqueue_worker.task_log import TaskLog
from taskqueue_worker.worker_scope import WorkerScope

F = TypeVar("F", bound=Callable[..., object])


class WorkerLink(msgspec.Struct, frozen=True):
    """A worker's connection to a server or a store."""

    connect: Callable[[WorkerRun], TaskSource]
    """creates the task source of a run"""
    local: bool
    """whether the worker receives from a store, and not from a server"""
    queue: Callable[[], Queue]
    """returns the connection through which handlers publish, always the same; thread-safe"""
    options: dict[str, str | None] | None = None
    """how a child process opens such a connection: the ``backend``, and the options of a server; ``None``: it cannot"""


_log = logging.getLogger("taskqueue.worker")


class BaseWorker(ABC):
    """A worker, which receives the tasks of all keys that have a handler, and calls the handlers.

    A task is acked after its execution, so a task whose worker crashes is executed again.

    >>> isinstance(LocalWorker(tasks), BaseWorker)
    True
    """

    def __init__(
        self,
        tasks: tuple[Tasks, ...],
        *,
        worker_id: str | None,
        concurrency: int,
        prefetch: int,
        grace: float,
        quarantine: Callable[[], Quarantine],
    ) -> None:
        """Store the options without any I/O. Raises `ConfigurationError` if an option is invalid."""
        for registry in tasks:
            if not isinstance(registry, Tasks):
                raise ConfigurationError(
                    f"a worker takes registries of tasks, got a {type(registry).__name__}: pass an address as url=..., "
                    "and a backend as backend=..."
                )
        try:
            check_duration("grace", grace)
        except InvalidInput as error:
            raise ConfigurationError(str(error)) from None
        self._worker_id: str | None = None
        self._concurrency = self._prefetch = 0
        self._grace = grace
        self._tasks_per_child: int | None = None
        self._only: frozenset[str] | None = None
        self._apply, self.target = False, "MODULE:ATTR"
        self._quarantine = quarantine
        self._handlers = Handlers()
        self._own_tasks = Tasks()
        self._tasks = (*tasks, self._own_tasks)
        self._current_run: WorkerRun | None = None
        self._configure(worker_id, concurrency, prefetch)

    def configure(
        self,
        *,
        worker_id: str | None = None,
        concurrency: int | None = None,
        only: Collection[str] | None = None,
        apply: bool | None = None,
        tasks_per_child: int | None = None,
    ) -> None:
        """Change the options that are not ``None``. Raises `ConfigurationError` during a run, or if one is invalid.

        ``only`` are the names of the tasks to work for, instead of all. With ``apply``, the worker writes the policies
        of its tasks into the settings of their queues when it starts, as `taskqueue_core.Tasks.apply` does: this is for
        development, because old and new workers overlap in a rollout. ``tasks_per_child`` is the number of tasks after
        which a child process, of tasks with ``run="process"``, is replaced.

        >>> worker.configure(concurrency=4, only=["shop.resize"])
        """
        self._configure(worker_id, concurrency, only=only, tasks_per_child=tasks_per_child)
        self._apply = self._apply if apply is None else apply

    def _configure(
        self,
        worker_id: str | None,
        concurrency: int | None,
        prefetch: int | None = None,
        only: Collection[str] | None = None,
        tasks_per_child: int | None = None,
    ) -> None:
        if self._current_run is not None:
            raise ConfigurationError("this worker is already running")
        if tasks_per_child is not None:
            if type(tasks_per_child) is not int or tasks_per_child < 1:
                raise ConfigurationError("tasks_per_child must be at least 1")
            self._tasks_per_child = tasks_per_child
        if only is not None:
            self._only = frozenset(only)
            self._check_only()
            self._handlers = Handlers()
        if concurrency is not None:
            ahead = self._prefetch if prefetch is None else prefetch
            whole = type(concurrency) is type(ahead) is int
            if not whole or concurrency < 1 or ahead < 0 or concurrency + ahead > LIMITS.credit:
                raise ConfigurationError(
                    f"concurrency must be at least 1, prefetch at least 0, and their sum at most {LIMITS.credit}"
                )
            self._concurrency, self._prefetch = concurrency, ahead
        if worker_id is not None:
            try:
                check_name("worker_id", worker_id)
            except InvalidInput as error:
                raise ConfigurationError(str(error)) from error
            self._worker_id = worker_id

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that have a handler, in the order of registration."""
        self._add_declared()
        return self._handlers.keys

    def _add_declared(self) -> None:
        for function in self.functions:
            if self._only is None or function.name in self._only:
                self._handlers.add(function)

    def _check_only(self) -> None:
        chosen = self._only or frozenset()
        names = [function.name for function in self.functions]
        if unknown := chosen.difference(names):
            raise ConfigurationError(
                f"only: there is no task {min(unknown)!r}; the tasks are: {', '.join(names)}"
            )
        queues = {function.queue for function in self.functions if function.name in chosen}
        for function in self.functions:
            if function.queue in queues and function.name not in chosen:
                raise ConfigurationError(
                    f"only: the task {function.name!r} shares the queue {function.queue!r} with a chosen one: "
                    "name all tasks of a queue, or none"
                )

    @property
    def functions(self) -> tuple[Handler, ...]:
        """The tasks of the registries, and those of `task`."""
        return tuple(each for tasks in self._tasks for each in tasks.functions.values())

    def declared(self) -> dict[str, dict[str, Any]]:
        """Return the settings that the tasks of this worker declare, by queue.

        `task` declares no retry policy, so the queues of its handlers keep theirs. Raises `ConfigurationError` if tasks
        declare different settings for a queue that they share.
        """
        own = declared_settings(self._own_tasks.functions.values(), retry=None)
        functions = (each for tasks in self._tasks[:-1] for each in tasks.functions.values())
        declared = own | declared_settings(functions)
        return {key: fields for key, fields in declared.items() if fields and key in self.keys}

    def declared_schedules(self) -> tuple[DeclaredSchedules, ...]:
        """Return the schedules that the registries of this worker declare."""
        return tuple(tasks.declared_schedules() for tasks in self._tasks[:-1])

    @overload
    def task(self, function: F, /) -> F: ...
    @overload
    def task(
        self,
        key: str | None = None,
        /,
        *,
        timeout: float | None = None,
        on_error: ErrorRules | None = None,
        batch: int | None = None,
    ) -> Callable[[F], F]: ...

    def task(
        self,
        key: F | str | None = None,
        /,
        *,
        timeout: float | None = None,
        on_error: ErrorRules | None = None,
        batch: int | None = None,
    ) -> F | Callable[[F], F]:
        """Register the decorated function as the handler of ``key``, by default its own name, and return it unchanged.

        ``@worker.task`` without a call does the same. To publish the function from Python, declare it in a
        `taskqueue_core.Tasks` instead.

        ``async`` functions run in the event loop, other functions in threads. After ``timeout`` seconds the attempt
        fails. An async handler is then cancelled. A synchronous handler cannot be cancelled, so it occupies its slot
        until it returns. ``on_error`` is as for `taskqueue_core.Tasks.task`.

        With ``batch``, one call handles up to ``batch`` tasks: a parameter annotated ``list[T]`` receives their
        payloads, and a parameter annotated ``list[Context]`` their contexts. The handler returns nothing, or a list
        with one result for each task; an exception in the list makes only its task fail. If the handler raises an
        exception, all tasks of the call fail.

        Raises `ConfigurationError` if the key, an option or the signature is invalid.
        """

        def register(function: F) -> F:
            name = key if isinstance(key, str) else None
            self._own_tasks.task(name, timeout=timeout, on_error=on_error, batch=batch)(function)
            self._add_declared()
            return function

        if key is None or isinstance(key, str):
            return register
        return register(key)

    def run(self, *, on_ready: Callable[[], None] | None = None) -> None:
        """Run the worker until SIGTERM or SIGINT; a second signal is `stop(now=True)`, and ends the process in 10 s.

        If logging is not configured, write the logs of all loggers to stderr, as the settings ``TASKQUEUE_LOG_LEVEL``
        and ``TASKQUEUE_LOG_FORMAT`` say. Must be called in the main thread. Raises the same exceptions as `serve`;
        ``on_ready`` is as there.
        """
        if not logging.getLogger().handlers:
            from taskqueue_core.logs import set_up_logs  # noqa: PLC0415 - slow to import

            settings = load_settings(Settings)
            level = logging.getLevelNamesMapping()[settings.log_level.upper()]
            set_up_logs(level=level, form=settings.log_format, everything=True)
        run_process(self.serve(on_ready=on_ready, signals=True))

    def _unfinished(self) -> str | None:
        return None if self._current_run is None else self._current_run.scope.closing.unfinished

    def _on_signal(self) -> None:
        immediate = self._current_run is not None and self._current_run.stopping
        _log.info(
            "stopping now; releasing all running tasks"
            if immediate
            else "stopping; a second signal releases all running tasks"
        )
        self.stop(now=immediate)

    async def serve(
        self, *, on_ready: Callable[[], None] | None = None, signals: bool = False
    ) -> None:
        """Run the worker until `stop` is called. Cancelling this call releases all running tasks.

        ``on_ready`` is called once: when the server has welcomed this worker, or when the store has answered. With
        ``signals``, which needs the main thread, SIGTERM and SIGINT stop the worker; a second one is `stop(now=True)`.

        Raises `WorkerQuarantined` if too many attempts fail in a row, `SystemExit` or `KeyboardInterrupt` if a handler
        raises one of them, and what a lifespan raises.
        """
        if self._current_run is not None:
            raise ConfigurationError("this worker is already running")
        if not self.keys:
            raise ConfigurationError(
                "this worker has no handlers: declare some with @tasks.task, or register them with @worker.task"
            )
        worker_id = self._worker_id or _make_worker_id()
        declared, schedules = self.declared(), self.declared_schedules()
        task_log = self._create_task_log(worker_id)
        handling = (
            stopped_by_signals(self._on_signal, self._unfinished) if signals else nullcontext()
        )
        async with (
            handling,
            self._open_source(worker_id) as link,
            self._open_children(worker_id, link) as children,
        ):
            scope = WorkerScope(link.queue)
            scope.children = children
            capacity = self._concurrency + self._prefetch
            run = self._current_run = WorkerRun(
                self._handlers,
                scope,
                self._quarantine(),
                concurrency=self._concurrency,
                capacity=capacity,
                grace=self._grace,
                task_log=task_log,
                on_ready=on_ready,
            )
            comparing: asyncio.Task[None] | None = None
            try:
                if declared or any(each.schedules for each in schedules):
                    found = Declared(declared, schedules, self._handlers, self.target)
                    if self._apply or link.local:
                        await found.apply(link.queue().backend, asked=self._apply)
                    watching = found.watch(link.queue, run.reconnected, asked=self._apply)
                    comparing = asyncio.create_task(watching)
                async with scope.open(self._tasks, run.starting):
                    await run.work(link.connect)
            except TimeoutError:
                if not run.starting.expired():  # otherwise the run was stopped before it started
                    raise
            finally:
                self._current_run = None
                if comparing is not None:
                    comparing.cancel()
                    await asyncio.gather(comparing, return_exceptions=True)

    def _open_children(
        self, worker_id: str, link: WorkerLink
    ) -> AbstractAsyncContextManager[ChildProcesses | None]:
        handlers = [each for each in self._handlers.all if each.options.run == "process"]
        if not handlers:
            return nullcontext()
        hide_texts = load_settings(Settings).log_errors == "frames"
        begin = begin_of(handlers, self._tasks, worker_id, link.options, hide_texts=hide_texts)
        return ChildProcesses.opened(begin, self._tasks_per_child)

    def _create_task_log(self, worker_id: str) -> TaskLog:
        return TaskLog(worker_id, hide_texts=load_settings(Settings).log_errors == "frames")

    @property
    def ready(self) -> bool:
        """Whether the worker receives tasks: it is connected to the server or the store, and is not stopping."""
        run = self._current_run
        return run is not None and run.connected and not run.stopping

    def report(self) -> WorkerReport:
        """Return the present state of this worker, and what it has done in this run.

        >>> worker.report().running
        0
        """
        run = self._current_run
        if run is None:
            return WorkerReport(keys=self.keys, concurrency=self._concurrency, grace=self._grace)
        return WorkerReport(
            keys=self.keys,
            concurrency=self._concurrency,
            grace=self._grace,
            ready=self.ready,
            running=run.runner.running if run.connected else 0,
            outcomes={
                key: {outcome_name(kind): number for kind, number in counts.items()}
                for key, counts in run.outcomes.items()
            },
        )

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the tasks come from, for messages: the address of the server, or the name of the backend."""

    @abstractmethod
    def _open_source(self, worker_id: str) -> AbstractAsyncContextManager[WorkerLink]:
        """Prepare the connection to the server or the store."""

    def stop(self, *, now: bool = False) -> None:
        """Make `serve` return when the running handlers have ended, or after the grace period, whichever is earlier.

        With ``now``, there is no grace period, and a lifespan or a shared dependency that closes is cancelled, or left
        unclosed if it ignores that; those that close later have 5 seconds each. Thread-safe. Has no effect if the
        worker is not running.
        """
        if current_run := self._current_run:
            current_run.stop(now=now)


def _make_worker_id() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip(".-_")[:100] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
