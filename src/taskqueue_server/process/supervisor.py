"""Several server processes on one port, and the supervisor that starts, restarts and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from taskqueue_core.assembly import open_backend
from taskqueue_core.config import Settings
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.logs import set_level
from taskqueue_server.auth.access import check_host
from taskqueue_server.process import channel, systemd
from taskqueue_server.process.listeners import Port
from taskqueue_server.process.reload import Reread, reload_settings, signals

RESTART_SECONDS = 5.0
"""a process that fails within this many seconds, or exits before it accepts connections, counts as a failed start"""
MAX_FAILED_STARTS = 5
"""number of failed starts in a row after which the supervisor gives up"""
_PAUSE, _MAX_PAUSE = 0.1, 5.0
_KILL_SECONDS = 10.0
"""seconds from the drain timeout until a process that still runs is killed, because its event loop is stuck"""
_STOP_SECONDS = 5.0
_NOT_FOR_CHILDREN = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_log = logging.getLogger("taskqueue.server")


class Processes:
    """Supervisor that keeps ``settings.processes`` server processes running until shutdown. Call `run` only once."""

    def __init__(
        self,
        settings: Settings,
        name: str | None = None,
        *,
        on_ready: Callable[[str], None] | None = None,
        read: Reread | None = None,
    ) -> None:
        """Create a supervisor that calls ``on_ready`` with the URL once all processes are ready.

        With ``read``, SIGHUP reloads the settings.
        """
        self._settings = settings
        self._backend = name or settings.backend
        self._on_ready = on_ready
        self._read = read
        self._children: dict[int, _Child] = {}
        self._unready = set(range(settings.processes))
        self._ending = asyncio.Event()
        self._at_once = asyncio.Event()
        self._error: TaskQueueError | None = None

    async def run(self) -> None:
        """Serve until `stop`, or until a signal if this is the main thread.

        Raises `ConfigurationError` for invalid settings, and `TaskQueueError` if processes keep exiting right after
        their start.
        """
        await self._require_shared_store()
        with (
            tempfile.TemporaryDirectory(prefix="taskqueue-metrics-") as metrics,
            contextlib.closing(Port(self._settings)) as port,
            systemd.watched(),
            signals(self.stop, self.reload if self._read else None),
        ):
            async with asyncio.TaskGroup() as group:
                for index in range(self._settings.processes):
                    group.create_task(self._supervise(index, port, metrics))
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Make all processes drain; the second call stops them at once."""
        if self._ending.is_set():
            self._at_once.set()
        else:
            systemd.stopping()
            self._ending.set()
        for child in self._children.values():
            child.send(channel.StopProcess(at_once=self._at_once.is_set()))

    def reload(self) -> None:
        """Read the settings again, and send them to all processes; invalid settings change nothing."""
        systemd.reloading()
        try:
            settings = None if self._read is None else reload_settings(self._settings, self._read)
            if settings is not None:
                self._settings = settings
                set_level(settings.log_level)
                for child in self._children.values():
                    child.send(channel.Renew(channel.plain(settings)))
        finally:
            systemd.ready()

    async def _require_shared_store(self) -> None:
        backend = open_backend(self._backend, self._settings)
        try:
            check_host(self._settings, backend.hooks)
            if not backend.capabilities.shared:
                raise ConfigurationError(
                    f"TASKQUEUE_PROCESSES: the backend {self._backend!r} is visible to one "
                    "process only; set 1, or use a shared backend such as redis"
                )
        finally:
            await backend.aclose()

    async def _supervise(self, index: int, port: Port, metrics: str) -> None:
        """Run a server process, and start another one whenever it exits, until shutdown."""
        failed_starts = 0
        while not self._ending.is_set():
            began = time.monotonic()
            async with self._start_child(port, metrics) as child:
                self._children[index] = child
                served = await self._watch(index, child)
            del self._children[index]
            with contextlib.suppress(FileNotFoundError):  # a metrics scrape may delete the files
                mark_process_dead(child.process.pid, metrics)  # type: ignore[no-untyped-call]
            if self._ending.is_set():
                return
            code = child.process.returncode
            lasted = served and (not code or time.monotonic() - began > RESTART_SECONDS)
            failed_starts = 0 if lasted else failed_starts + 1
            fields = {"pid": child.process.pid, "code": code}
            if failed_starts >= MAX_FAILED_STARTS:
                _log.critical(
                    "server processes exit right after their start; giving up", extra=fields
                )
                self._give_up(TaskQueueError("server processes exit right after their start"))
                return
            level = (
                logging.ERROR if code else logging.WARNING
            )  # exit code 0 means that a signal stopped the process
            _log.log(level, "server process exited; starting another", extra=fields)
            with contextlib.suppress(TimeoutError):
                pause = min(_PAUSE * 2**failed_starts, _MAX_PAUSE)
                await asyncio.wait_for(self._ending.wait(), pause)

    async def _watch(self, index: int, child: _Child) -> bool:
        """Read the messages of a process until it ends. Return whether it accepted connections."""
        served = False
        killer = asyncio.create_task(self._kill_late(child))
        try:
            async for name in channel.received(child.reader, channel.MESSAGES):
                match name:
                    case channel.Listening():
                        served = True
                        self._serves(index, child)
                    case channel.ProcessFailed(reason):
                        self._give_up(ConfigurationError(reason))
            await child.process.wait()
        finally:
            killer.cancel()
        return served

    def _serves(self, index: int, child: _Child) -> None:
        _log.info("server process ready", extra={"pid": child.process.pid})
        if self._unready:
            self._unready.discard(index)
            if not self._unready and not self._ending.is_set():
                url, number = child.url, self._settings.processes
                _log.info("all server processes ready", extra={"url": url, "processes": number})
                systemd.ready(f"{number} processes at {url}")
                if self._on_ready is not None:
                    self._on_ready(url)

    async def _kill_late(self, child: _Child) -> None:
        """Kill a process that does not exit in time because its event loop is stuck."""
        await self._ending.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._at_once.wait(), self._settings.drain + _KILL_SECONDS)
            await asyncio.sleep(_STOP_SECONDS)
        _log.error(
            "server process did not exit in time and was killed", extra={"pid": child.process.pid}
        )
        child.kill()

    def _give_up(self, failure: TaskQueueError) -> None:
        if self._error is None:
            self._error = failure
        if not self._ending.is_set():
            self.stop()

    @asynccontextmanager
    async def _start_child(self, port: Port, metrics: str) -> AsyncIterator[_Child]:
        own_end, child_end = socket.socketpair()
        with child_end, port.share() as listener:
            reader, writer = await asyncio.open_connection(sock=own_end, limit=channel.LINE)
            files = (child_end.fileno(), listener.fileno())
            environment = {n: v for n, v in os.environ.items() if n not in _NOT_FOR_CHILDREN}
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "taskqueue_server.process.child",
                    *map(str, files),
                    pass_fds=files,
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**environment, "PROMETHEUS_MULTIPROC_DIR": metrics},
                    process_group=0,  # Ctrl-C reaches only the supervisor, which passes it on
                )
            except BaseException:
                writer.close()
                raise
        child = _Child(process, port.url, reader, writer)
        try:
            child.send(channel.Begin(channel.plain(self._settings), self._backend, sys.path))
            if self._ending.is_set():
                child.send(channel.StopProcess(at_once=self._at_once.is_set()))
            yield child
        finally:
            child.writer.close()
            child.kill()
            await process.wait()


class _Child(msgspec.Struct, eq=False):
    process: asyncio.subprocess.Process
    url: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, order: channel.Order) -> None:
        if not self.writer.is_closing():
            self.writer.write(channel.line(order))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
