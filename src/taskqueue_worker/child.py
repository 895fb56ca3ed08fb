"""A process in which a worker runs tasks, one at a time: ``python -m taskqueue_worker.child SOCKET``.

The argument is a file descriptor. `taskqueue_worker.child_processes` starts the process, which ends with the worker.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from taskqueue_core.application.registry import Tasks
from taskqueue_core.assembly import open_backend
from taskqueue_core.capabilities import NewEvent
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.queue import Queue
from taskqueue_core.retry import Outcome
from taskqueue_core.sync import SyncQueue
from taskqueue_worker import closing
from taskqueue_worker.child_messages import (
    LENGTH,
    ORDERS,
    Begin,
    DrainAsked,
    Drained,
    Ended,
    NotStarted,
    Order,
    ProgressMade,
    Ready,
    Record,
    Report,
    RunTask,
    Streamed,
    packed,
)
from taskqueue_worker.handlers import Handlers
from taskqueue_worker.outcomes import outcome_of_error
from taskqueue_worker.process_end import ProcessEnd, run_process
from taskqueue_worker.runner import HandlerRunner
from taskqueue_worker.task_log import TaskLog
from taskqueue_worker.worker_scope import WorkerScope

_deliveries = msgspec.json.Decoder(WireDelivery)


class Channel:
    """The child's end of the socket. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        self._socket = connection
        connection.set_inheritable(False)  # programs that a task starts do not keep it open
        self._file = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, report: Report) -> None:
        """Send a report; a worker that has ended does not get it."""
        with self._lock, suppress(OSError):
            self._socket.sendall(packed(report))

    def receive(self) -> Order | None:
        """Wait for the next order; ``None`` if the worker has closed its end."""
        head = self._file.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        body = self._file.read(length)
        return ORDERS.decode(body) if len(body) == length else None


class _ForwardingHandler(logging.Handler):
    """A handler that sends log records to the worker, where they are handled as if they were made there."""

    _standard = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(self._report(record))
        except Exception:  # noqa: BLE001 - arguments that do not fit the message may raise any exception
            self.handleError(record)

    def _report(self, record: logging.LogRecord) -> Record:
        fields = {name: value for name, value in vars(record).items() if name not in self._standard}
        message: str = record.getMessage()
        failure: Any = record.exc_info
        if isinstance(record.msg, dict) and "_logger" in fields:  # an event of structlog
            event = dict(record.msg)
            message, failure = str(event.pop("event", "")), event.pop("exc_info", None)
            fields = {**fields, **event}
            del fields["_logger"], fields["_name"]
        if failure is True:
            failure = sys.exc_info()
        elif isinstance(failure, BaseException):
            failure = (type(failure), failure, failure.__traceback__)
        text = getattr(failure, "text", None) or record.exc_text
        if failure and not text:
            text = self._formatter.formatException(failure)
        return Record(record.name, record.levelno, message, fields, text)


class _ChildScope(WorkerScope):
    """The scope of handlers in a child, which opens a connection like the worker's when a handler uses it first."""

    def __init__(self, options: dict[str, str | None] | None) -> None:
        """Create the scope. Without ``options``, handlers have no connection but those of their registries."""
        super().__init__(self._opened)
        self._options = options
        self._lock = threading.Lock()
        self._queue: Queue | None = None

    def queue(self) -> Queue | None:
        return None if self._options is None else super().queue()

    def sync_queue(self) -> SyncQueue | None:
        return None if self._options is None else super().sync_queue()

    async def aclose(self) -> None:
        """Close the connection."""
        if self._queue is not None:
            await self._queue.backend.aclose()

    def _opened(self) -> Queue:
        with self._lock:
            if self._queue is None:
                server = dict(self._options or {})
                self._queue = Queue(open_backend(server.pop("backend"), server=server))
            return self._queue

    def is_here(self) -> bool:
        return False  # the slot of the task is in the worker, and cannot be lent from here


class _Settler:
    """Reports the outcome of the running task to the worker."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.result_limit = 0
        self.busy = False
        self._lock = threading.Lock()
        self._callbacks: deque[Callable[[], None]] = deque()

    def settle(self, _receipt: str, outcome: Outcome) -> None:
        self.busy = False
        try:
            self._channel.send(Ended.of(outcome))
        except Exception as error:  # noqa: BLE001 - without a report, the worker would wait until the timeout
            self._channel.send(Ended.of(outcome_of_error(error)))

    finish = settle

    def free(self) -> None:
        """Do nothing: the process has one slot, which the worker fills."""

    def lend(self, count: int) -> None:
        """Do nothing: waits are refused here."""

    def progress(self, _receipt: str, value: float | str) -> None:
        self._channel.send(ProgressMade(value))

    def stream(self, _receipt: str, event: NewEvent) -> None:
        self._channel.send(Streamed(event.value, event.channel))

    def drained(self, _receipt: str, callback: Callable[[], None]) -> None:
        with self._lock:  # so that the answers have the order of the callbacks
            self._callbacks.append(callback)
            self._channel.send(DrainAsked())

    def answered(self) -> None:
        """Call the oldest callback of `drained`."""
        self._callbacks.popleft()()


async def _serve(channel: Channel, begin: Begin, end: ProcessEnd) -> None:
    handlers, registries = _imported(begin)
    _set_up_logs(channel, begin)
    scope = _ChildScope(begin.connection)
    async with aclosing(scope), scope.open(registries, asyncio.timeout(None)):
        settler = _Settler(channel)
        log = TaskLog(begin.worker_id, hide_texts=begin.hide_texts)
        runner = HandlerRunner(
            handlers, scope, settler, 1, log, on_outcome=lambda *_: None, on_fatal=_exit
        )
        closed = asyncio.Event()
        loop = asyncio.get_running_loop()
        channel.send(Ready())

        def deliver(order: RunTask) -> None:
            settler.result_limit = order.result_limit
            runner.deliver([_deliveries.decode(order.delivery)])

        def read() -> None:
            while isinstance(order := channel.receive(), RunTask | Drained):
                if isinstance(order, Drained):
                    settler.answered()
                    continue
                settler.busy = True
                loop.call_soon_threadsafe(deliver, order)
            if settler.busy:
                os._exit(1)  # the worker has ended, so nothing that the task does counts
            loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=read, name="taskqueue-child", daemon=True).start()
        await closed.wait()
        runner.close()
        end.unfinished = lambda: scope.closing.unfinished
        end.begin(closing.CLOSE_SECONDS + closing.CLEANUP_SECONDS)
        scope.closing.hurry()


def _imported(begin: Begin) -> tuple[Handlers, list[Tasks]]:
    for name in begin.modules:
        importlib.import_module(name)
    registries = []
    for module, attribute in begin.registries:
        registry = getattr(importlib.import_module(module), attribute, None)
        if not isinstance(registry, Tasks):
            raise ConfigurationError(f"{module}:{attribute} is no registry in the child process")
        registries.append(registry)
    handlers = Handlers()
    for name in begin.names:
        found = [each.functions[name] for each in registries if name in each.functions]
        if not found:
            raise ConfigurationError(
                f"the import of {', '.join(begin.modules)} does not declare the task {name!r} in the child process: "
                "declare it when its module is imported"
            )
        handlers.add(found[0])
    handlers.timeouts.clear()  # the worker ends an attempt after its timeout, with this process
    return handlers, registries


def _set_up_logs(channel: Channel, begin: Begin) -> None:
    root = logging.getLogger()
    if not root.handlers:  # otherwise the application has configured logging when it was imported
        root.addHandler(_ForwardingHandler(channel))
        root.setLevel(begin.level)
    if begin.structlog:
        from taskqueue_core.logs import set_up_structlog  # noqa: PLC0415 - slow to import

        set_up_structlog()


def _exit(error: BaseException) -> None:
    code = getattr(error, "code", None)
    os._exit(code if isinstance(code, int) else 1)


def _guarded(channel: Channel, start: Callable[[], None]) -> None:
    try:
        start()
    except ConfigurationError as error:
        channel.send(NotStarted(str(error), configuration=True))
    except ImportError as error:
        channel.send(NotStarted(f"{type(error).__name__}: {error}", configuration=True))
    except Exception as error:  # noqa: BLE001 - a module or a lifespan may raise any exception
        channel.send(NotStarted(f"{type(error).__name__}: {error}", configuration=False))


def main() -> None:
    """Run tasks until the worker closes the socket."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    begin = channel.receive()
    if isinstance(begin, Begin):
        sys.path[:] = begin.path
        end = ProcessEnd()
        _guarded(channel, lambda: run_process(_serve(channel, begin, end), end))


if __name__ == "__main__":
    main()
