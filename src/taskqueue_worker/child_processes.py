"""The child processes in which a worker runs tasks that are declared with ``run="process"``."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from types import ModuleType

import msgspec

from taskqueue_core.application.registry import Tasks
from taskqueue_core.capabilities import NewEvent
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.protocol.frames import WireDelivery, to_wire
from taskqueue_core.retry import Outcome
from taskqueue_worker.batch_buffer import AnyDelivery
from taskqueue_worker.child_messages import (
    LENGTH,
    REPORTS,
    Begin,
    DrainAsked,
    Drained,
    Ended,
    NotStarted,
    Order,
    ProgressMade,
    Ready,
    Record,
    RunTask,
    Streamed,
    packed,
)
from taskqueue_worker.closing import CLEANUP_SECONDS, CLOSE_SECONDS
from taskqueue_worker.handlers import Handler
from taskqueue_worker.outcome_settler import OutcomeSettler

_failures = logging.NullHandler()
"""prints, as the handlers of logging do, that a record could not be handled"""
_log = logging.getLogger("taskqueue.worker")
_END_SECONDS = CLOSE_SECONDS + 2 * CLEANUP_SECONDS
"""seconds that an idle child process has to close its lifespans and to end, before it is killed"""
_LAST_SECONDS = 1.0
"""seconds for reading what a process has sent before its end, if another process still holds its socket open"""


class ChildProcessEnded(TaskQueueError):
    """The child process that ran a task has ended before the task had an outcome."""

    code = "child_process_ended"


class ChildProcesses:
    """Child processes that run one task each at a time. They belong to one event loop.

    A process is started when none is idle, so there are as many as tasks ran at once.
    """

    def __init__(self, begin: Begin, tasks_per_child: int | None) -> None:
        """Create an object without processes. A process is replaced after ``tasks_per_child`` tasks."""
        self._begin = begin
        self._tasks_per_child = tasks_per_child
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, begin: Begin, tasks_per_child: int | None
    ) -> AsyncIterator[ChildProcesses]:
        """Yield the processes, none of which runs yet, and end them all."""
        processes = cls(begin, tasks_per_child)
        try:
            yield processes
        finally:
            await processes._close()

    async def start_first(self) -> None:
        """Start the first process. A cancellation kills it.

        Raises `ConfigurationError` if a process cannot import the tasks, and `ChildProcessEnded` if its lifespan fails.
        """
        self._idle.append(await self._start())

    async def run(
        self,
        delivery: AnyDelivery,
        *,
        settler: OutcomeSettler,
        on_start: Callable[[], None],
    ) -> Outcome:
        """Run one task, and return its outcome. A cancellation kills the process.

        ``settler`` gets the progress and the events. ``on_start`` is called when a process gets the task. Raises
        `ChildProcessEnded` if the process ends before.
        """
        wire = delivery if isinstance(delivery, WireDelivery) else to_wire(delivery)
        # The worker ends an attempt after its timeout, so the child does not.
        text = msgspec.json.encode(msgspec.structs.replace(wire, timeout=None))
        child = self._idle.pop() if self._idle else await self._start()
        on_start()
        try:
            outcome = await child.run(
                RunTask(text, settler.result_limit), delivery.receipt, settler
            )
        except BaseException:
            child.kill()
            raise
        if self._tasks_per_child is not None and child.tasks >= self._tasks_per_child:
            child.close()
        else:
            self._idle.append(child)
        return outcome

    async def _start(self) -> _Child:
        own_end, child_end = socket.socketpair()
        with child_end:
            reader, writer = await asyncio.open_connection(sock=own_end)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "taskqueue_worker.child"),
                    str(child_end.fileno()),
                    pass_fds=[child_end.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C reaches only the worker, which ends its tasks
                )
            except BaseException:
                writer.close()
                raise
        child = _Child(process, reader, writer, self._forget)
        self._all.add(child)
        try:
            await child.start(self._begin)
        except BaseException:
            child.kill()
            raise
        return child

    def _forget(self, child: _Child) -> None:
        self._all.discard(child)
        if child in self._idle:
            self._idle.remove(child)

    async def _close(self) -> None:
        ending = [child.watching for child in self._all]
        for child in self._all:
            child.close()
        await asyncio.gather(*ending, return_exceptions=True)


class _Child:
    """One child process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_end: Callable[[_Child], None],
    ) -> None:
        self.tasks = 0
        """number of tasks that it has got"""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._on_end = on_end
        self._settler: OutcomeSettler | None = None
        self._receipt = ""
        self._answer: asyncio.Future[Ready | NotStarted | Ended] | None = None
        self._gone = False
        self.watching = asyncio.create_task(self._watch())

    async def start(self, begin: Begin) -> None:
        """Wait until the process can run tasks."""
        answer = await self._ask(begin)
        if isinstance(answer, NotStarted):
            kind = ConfigurationError if answer.configuration else ChildProcessEnded
            raise kind(f"tasks with run='process' cannot start: {answer.reason}")

    async def run(self, order: RunTask, receipt: str, settler: OutcomeSettler) -> Outcome:
        """Run a task, and return its outcome."""
        self.tasks += 1
        self._receipt, self._settler = receipt, settler
        answer = await self._ask(order)
        self._settler = None
        assert isinstance(answer, Ended)  # noqa: S101 - a child reports that it is ready only once
        return answer.outcome()

    async def _ask(self, order: Order) -> Ready | NotStarted | Ended:
        if self.watching.done():
            raise self._end()
        self._answer = asyncio.get_running_loop().create_future()
        self._writer.write(packed(order))
        return await self._answer

    def close(self) -> None:
        """Let the process close its lifespans and end, within `_END_SECONDS`. Its log records still arrive."""
        with suppress(OSError):  # it has ended
            self._writer.write_eof()
        asyncio.get_running_loop().call_later(_END_SECONDS, self.kill)

    def kill(self) -> None:
        """End the process, and those that it has started in its process group, at once."""
        if not self._gone:  # later, the system may use the number for another group
            with suppress(ProcessLookupError, PermissionError):  # macOS: of a group that has ended
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _watch(self) -> None:
        """Receive reports until the process ends. Its own children may hold the socket open for longer."""
        reading = asyncio.create_task(self._read())
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait([reading, ended], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([ended], timeout=_END_SECONDS)
            self.kill()
            await ended
            self._gone = True
            await asyncio.wait([reading], timeout=_LAST_SECONDS)
        finally:
            self.kill()
            self._gone = True
            reading.cancel()
            ended.cancel()
            self._writer.close()
            self._on_end(self)
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(self._end())
            await asyncio.gather(reading, ended, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                self._receive(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except Exception:  # noqa: BLE001 - such as a value that MessagePack cannot decode
            self.kill()
            _log.exception("the child process was killed: its report cannot be handled")

    def _receive(self, body: bytes) -> None:
        match REPORTS.decode(body):
            case ProgressMade(value) if self._settler:
                self._settler.progress(self._receipt, value)
            case Streamed(value, channel) if self._settler:
                event = NewEvent(value=value, channel=channel)
                self._settler.stream(self._receipt, event)
            case DrainAsked() if self._settler:
                loop, write = asyncio.get_running_loop(), self._writer.write

                def report() -> None:
                    loop.call_soon_threadsafe(write, packed(Drained()))

                self._settler.drained(self._receipt, report)
            case Record() as record:
                _handle(record)
            case (Ready() | NotStarted() | Ended()) as answer if (
                self._answer is not None and not self._answer.done()
            ):
                self._answer.set_result(answer)
            case _:
                pass

    def _end(self) -> ChildProcessEnded:
        code = self._process.returncode or 0
        if code < 0:
            return ChildProcessEnded(f"the child process was killed by {_signal_name(-code)}")
        return ChildProcessEnded(f"the child process ended with exit code {code}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _handle(record: Record) -> None:
    logger = logging.getLogger(record.name)
    if not logger.isEnabledFor(record.level):
        return
    attributes = {
        **record.fields,
        "name": record.name,
        "levelno": record.level,
        "levelname": logging.getLevelName(record.level),
        "msg": record.message,
        "exc_text": record.exception,
    }
    log_record = logging.makeLogRecord(attributes)
    try:
        logger.handle(log_record)
    except Exception:  # noqa: BLE001 - a filter may raise any exception, which must not end the attempt
        _failures.handleError(log_record)


def begin_of(
    handlers: Iterable[Handler],
    registries: Iterable[Tasks],
    worker_id: str,
    connection: dict[str, str | None] | None,
    *,
    hide_texts: bool,
) -> Begin:
    """Return what a child imports for these tasks. Raises `ConfigurationError` if it cannot import them."""
    if sys.platform == "win32":
        raise ConfigurationError("run='process' needs Linux or macOS")
    handlers = tuple(handlers)
    modules: dict[str, None] = {}
    paths: dict[tuple[str, str], None] = {}
    for handler in handlers:
        modules[_importable(_module_of(handler), handler)] = None
        registry = next(each for each in registries if handler.name in each.functions)
        paths[_path_of(registry, handler)] = None
    structlog = False
    if "structlog" in sys.modules:
        from taskqueue_core.logs import structlog_is_set_up  # noqa: PLC0415 - slow to import

        structlog = structlog_is_set_up()
    return Begin(
        path=sys.path,
        modules=list(modules),
        registries=list(paths),
        names=[handler.name for handler in handlers],
        worker_id=worker_id,
        connection=connection,
        hide_texts=hide_texts,
        level=logging.getLogger().getEffectiveLevel(),
        structlog=structlog,
    )


def _module_of(handler: Handler) -> str:
    function = handler.function
    while not hasattr(function, "__module__") and hasattr(function, "func"):
        function = function.func
    return str(function.__module__)


def _path_of(registry: Tasks, handler: Handler) -> tuple[str, str]:
    """Return the module and the attribute of a registry; the module of the function comes first."""
    first = sys.modules.get(_module_of(handler))
    every: list[ModuleType | None] = [first, *tuple(sys.modules.values())]
    for module in every:
        for attribute, value in tuple(getattr(module, "__dict__", {}).items()):
            if value is registry and module is not None:
                return _importable(module.__name__, handler), attribute
    raise ConfigurationError(
        f"the task {handler.name!r} has run='process', but its registry is not a variable of a module: assign it to "
        "one, as in tasks = Tasks()"
    )


def _importable(module: str, handler: Handler) -> str:
    if module != "__main__":
        return module
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return str(spec.name)
    raise ConfigurationError(
        f"the task {handler.name!r} has run='process', but it is declared in the program itself, which a child process "
        "cannot import: move the tasks into a module of their own"
    )
