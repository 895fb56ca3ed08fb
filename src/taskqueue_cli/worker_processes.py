"""Several worker processes of one command: a supervisor that starts, replaces and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec

from taskqueue_cli.worker_board import Board
from taskqueue_core.concurrency import first_completed
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.loading import needs_extra
from taskqueue_worker import BaseWorker
from taskqueue_worker.report import WorkerReport

MAX_FAILED_STARTS = 5
"""number of failed starts in a row after which the supervisor gives up"""
_FAILED_SECONDS = 5.0
"""a process that ends within this many seconds counts as a failed start"""
_PAUSE, _MAX_PAUSE = 0.1, 5.0
_KILL_SECONDS = 15.0
"""seconds after the grace period, or the second signal, until a process that has not ended by itself is killed"""
_FINAL = (2, 4)
"""exit codes of errors that another start would meet again: configuration and access"""
_LINE = 1024 * 1024
_UNREAD = 64 * 1024
_log = logging.getLogger("taskqueue.worker")
_reports = msgspec.json.Decoder(WorkerReport)


class WorkerProcesses:
    """Supervisor that keeps worker processes running until SIGTERM or SIGINT. Call `run` only once."""

    def __init__(
        self,
        words: Sequence[str],
        number: int,
        board: Board,
        *,
        on_ready: Callable[[WorkerReport], None],
        worker_id: str | None = None,
        reload: Path | None = None,
    ) -> None:
        """Create a supervisor of ``number`` processes, which run ``taskqueue worker`` with the arguments ``words``.

        ``on_ready`` is called once, with a report, when all processes receive tasks. Each process has the given worker
        id with a number. With ``reload``, a changed Python file in this folder replaces all processes; a process that
        fails is not replaced before that.
        """
        self._words = tuple(words)
        self._number = number
        self._board = board
        self._on_ready: Callable[[WorkerReport], None] | None = on_ready
        self._worker_id = worker_id
        self._reload = reload
        self._started = 0
        self._children: set[_Child] = set()
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._changes = 0
        self._changed = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Run until a signal, and return the exit code: that of a process that keeps failing, or 0."""
        if sys.platform == "win32":
            raise ConfigurationError("--processes and --reload need Linux or macOS")
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._number):
                    group.create_task(self._keep(group))
                if self._reload is not None:
                    group.create_task(self._watch(self._reload))
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
        return self._code

    def stop(self) -> None:
        """Make all processes stop as after SIGTERM; a second call is a second signal."""
        if self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()
        for child in self._children:
            child.terminate()

    async def _keep(self, group: asyncio.TaskGroup) -> None:
        """Run a process, and replace it when it ends or when a file changes."""
        child, failures = await self._start(group), 0
        while not self._stopping.is_set():
            await first_completed(
                child.ended.wait(), self._changed_since(child.change), self._stopping.wait()
            )
            if self._stopping.is_set():
                return
            if child.ended.is_set():
                failures = await self._pause(child, failures)
                if not self._stopping.is_set():
                    child = await self._start(group)
                continue
            successor = await self._start(group)
            await first_completed(
                successor.ready.wait(), successor.ended.wait(), self._stopping.wait()
            )
            if successor.ready.is_set():
                _log.info("reloaded", extra={"pid": successor.process.pid})
                child.terminate()
                child = successor
            elif successor.ended.is_set():
                _log.error("the changed program does not start; the previous one continues")
                child.change = successor.change

    async def _pause(self, child: _Child, failures: int) -> int:
        """Wait until a process may be started after one that ended; return the number of failed starts in a row."""
        code = child.process.returncode
        fields = {"pid": child.process.pid, "code": code}
        if self._reload is not None:
            _log.error("worker process ended; waiting for a change", extra=fields)
            await first_completed(self._changed_since(child.change), self._stopping.wait())
            return 0
        age = asyncio.get_running_loop().time() - child.since
        failures = failures + 1 if age < _FAILED_SECONDS or not child.ready.is_set() else 0
        if code in _FINAL or failures >= MAX_FAILED_STARTS:
            _log.error("worker processes cannot start", extra=fields)
            self._code = self._code or (code if code and code > 0 else 1)
            if not self._stopping.is_set():
                self.stop()
            return failures
        _log.error("worker process ended; starting another", extra=fields)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_PAUSE * 2**failures, _MAX_PAUSE)):
                await self._stopping.wait()
        return failures

    async def _changed_since(self, change: int) -> None:
        while self._changes == change:
            await self._changed.wait()

    async def _watch(self, folder: Path) -> None:
        with needs_extra("dev"):
            from watchfiles import PythonFilter, awatch  # noqa: PLC0415 - an optional dependency
        async for _ in awatch(folder, watch_filter=PythonFilter(), stop_event=self._stopping):
            self._changes += 1
            self._changed.set()
            self._changed = asyncio.Event()

    async def _start(self, group: asyncio.TaskGroup) -> _Child:
        self._started = number = self._started + 1
        words = list(self._words)
        if self._worker_id is not None:
            words += ["--worker-id", f"{self._worker_id}-{number}"]
        own_end, child_end = socket.socketpair()
        with child_end:
            reader, writer = await asyncio.open_connection(sock=own_end, limit=_LINE)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "taskqueue_cli", "worker", *words),
                    *("--parent", str(child_end.fileno())),
                    pass_fds=[child_end.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C reaches only the supervisor, which passes it on
                )
            except BaseException:
                writer.close()
                raise
        child = _Child(process, reader, writer, number, self._changes)
        self._children.add(child)
        if self._stopping.is_set():
            child.terminate()
        group.create_task(self._attend(child))
        return child

    async def _attend(self, child: _Child) -> None:
        """Read the reports of a process until it has ended."""
        killer = asyncio.create_task(self._kill_late(child))
        try:
            with contextlib.suppress(ConnectionError, ValueError):
                async for line in child.reader:
                    child.report = report = _reports.decode(line)
                    self._board.put(child.number, report)
                    if report.ready and not child.ready.is_set():
                        child.ready.set()
                        self._report_ready(report)
            await child.process.wait()
        finally:
            killer.cancel()
            if child.process.returncode is None:
                child.process.kill()
                await child.process.wait()
            child.writer.close()
            self._board.remove(child.number)
            self._children.discard(child)
            child.ended.set()

    def _report_ready(self, report: WorkerReport) -> None:
        ready = sum(child.ready.is_set() for child in self._children)
        if self._on_ready is not None and ready >= self._number and not self._stopping.is_set():
            call, self._on_ready = self._on_ready, None
            call(report)

    async def _kill_late(self, child: _Child) -> None:
        await child.stopping.wait()
        grace = 0.0 if child.report is None else child.report.grace
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace + _KILL_SECONDS):
                await self._at_once.wait()
                await asyncio.sleep(_KILL_SECONDS)
        _log.error("worker process did not exit in time and was killed")
        child.process.kill()


class _Child(msgspec.Struct, eq=False):
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    change: int
    """number of changes of files before its start"""
    since: float = msgspec.field(default_factory=lambda: asyncio.get_running_loop().time())
    ready: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    stopping: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    ended: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    report: WorkerReport | None = None

    def terminate(self) -> None:
        self.stopping.set()
        if self.process.returncode is None:
            self.process.terminate()


@contextlib.asynccontextmanager
async def reporting_to_parent(
    descriptor: int, worker: BaseWorker
) -> AsyncIterator[Callable[[WorkerReport], None]]:
    """Yield a function that sends reports to the supervisor, and stop the worker if the supervisor ends."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))

    async def stop_without_parent() -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        while True:  # a worker that has not started yet ignores the call
            worker.stop()
            await asyncio.sleep(_PAUSE)

    def send(report: WorkerReport) -> None:
        if not reader.at_eof() and writer.transport.get_write_buffer_size() < _UNREAD:
            writer.write(msgspec.json.encode(report) + b"\n")

    watching = asyncio.create_task(stop_without_parent())
    try:
        yield send
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        writer.close()
