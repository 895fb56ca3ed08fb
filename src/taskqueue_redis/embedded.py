"""A private redis-server with an append-only file: durable on one machine, with nothing to set up."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.binaries import Binary, find_binary
from taskqueue_redis.watchdog import Watchdog

__all__ = ["EmbeddedRedis"]

_SETTINGS = """# Written anew at each start. Settings of your own belong into {extra}, beside this file.
port 0
unixsocket {socket}
unixsocketperm 600
daemonize no
databases 1
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
loglevel notice
always-show-logo no
"""
_EXTRA = "extra.conf"
_SEPARATOR = "--- start\n"
_STAMP = re.compile(r"^\d+:[A-Z] \d+ \w+ \d+ [\d:.]+ \S ")
"""such as "4711:M 21 Nov 2026 12:00:00.000 # ", before each line that Redis logs"""
_SOCKET_BYTES = 100
"""the longest path that every system takes for a Unix socket: Linux has room for 107 bytes, macOS for 103"""
_LOG_BYTES = 1_000_000
_GRACE_SECONDS, _LOCK_SECONDS = 0.5, 15.0
"""for the holder of a directory to let it go: one that lives, and one that has gone and left its server"""
_STOP_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_STEADY_SECONDS = 60.0
"""a server that ran so long is not failing again and again"""
_log = logging.getLogger("taskqueue.redis.embedded")


class EmbeddedRedis:
    """A redis-server of this process, on a Unix socket that only this user can open, with its files in ``directory``.

    From `start` to `close` (or as a context, plain or ``async``) it is kept running: when it ends
    by itself it is started again, after a pause that grows to 5 s. It is ended in order by `close`,
    and by a watchdog when this process has gone, however that ended. Two processes never have the
    same directory open. Methods block; the ``async`` context does so in another thread.
    """

    def __init__(self, directory: Path | str, *, binary: Binary | None = None) -> None:
        """Start nothing yet. Without a ``binary`` one is found, or fetched, by `find_binary`."""
        self.directory = Path(directory).expanduser().absolute()
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._keeper: threading.Thread | None = None
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._lock: int | None = None
        self._socket_folder: Path | None = None
        self.starts = 0
        """how often it was started; more than 1 after it ended by itself"""

    @property
    def url(self) -> str:
        """Where clients find it; the same over restarts."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """The id of the running server; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def binary(self) -> Binary | None:
        """What runs, once it was found."""
        return self._binary

    @property
    def _socket(self) -> Path:
        return (self._socket_folder or self.directory) / "redis.sock"

    # Start

    def start(self) -> Self:
        """Start it and wait until it answers with its data loaded, for as long as that goes on.

        Raises `ConfigurationError` where there is no redis-server, where the directory is not this
        user's or is open elsewhere, and where the server ends instead, with what it said.
        """
        try:
            self._start()
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"Redis cannot be started in {self.directory}: {error.strerror or error}"
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        if self._binary is None:
            self._binary = find_binary()
        self._prepare_directory()
        self._lock = self._locked()
        self._check_age(self._binary)
        if len(os.fsencode(self._socket)) > _SOCKET_BYTES:
            self._socket_folder = Path(
                tempfile.mkdtemp(prefix="taskqueue-redis-", dir=_short_folder())
            )
        self._watchdog = Watchdog("TERM")
        process = self._spawn(self._binary)
        if process is not None and not self._ready(process):
            # After a crash while it wrote its file anew Redis 7.0 refuses the first start, and takes the second.
            process = self._spawn(self._binary)
        if process is None or not self._ready(process):
            raise ConfigurationError(
                f"redis-server {self._binary.release} did not start in {self.directory}: {self._last_word()}"
            )
        _log.info("embedded Redis %s started", self._binary.release, extra={"url": self.url})
        self._keeper = threading.Thread(
            target=self._keep, args=(self._binary, process), name="taskqueue-redis", daemon=True
        )
        self._keeper.start()

    def _prepare_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.directory.stat()
        except OSError as error:
            raise ConfigurationError(
                f"the directory {self.directory} for Redis cannot be made: {error.strerror}"
            ) from None
        if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise ConfigurationError(
                f"{self.directory} must belong to the user who runs this, and nobody else may write to it: "
                f"chown it, and chmod go-w {self.directory}"
            )

    def _locked(self) -> int:
        """Lock the directory. The server inherits the lock, so it holds until both processes have ended."""
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).strip()
                # If only its server is left, that is ending: its watchdog sees to it.
                patience = _GRACE_SECONDS if _alive(holder) else _LOCK_SECONDS
                if time.monotonic() - began > patience or self._closing.is_set():
                    os.close(descriptor)
                    raise ConfigurationError(
                        f"the Redis in {self.directory} is in use by process {holder.decode() or '?'}: "
                        "end that, or choose another directory"
                    ) from None
                time.sleep(0.02)
        os.ftruncate(descriptor, os.pwrite(descriptor, b"%d\n" % os.getpid(), 0))
        return descriptor

    def _check_age(self, binary: Binary) -> None:
        # Redis before 7.0 does not see what newer ones write there, and would begin empty.
        if binary.version < (7, 0) and (self.directory / "appendonlydir").exists():
            raise ConfigurationError(
                f"{self.directory} was written by Redis 7.0 or newer, and redis-server {binary.release} "
                "cannot read it: put a newer redis-server on PATH, or choose another directory"
            )

    def _spawn(self, binary: Binary) -> subprocess.Popen[bytes] | None:
        """Start the server, unless this is being closed."""
        place = self._socket if self._socket_folder else self._socket.name
        text = _SETTINGS.format(extra=_EXTRA, socket=f'"{place}"')
        if (self.directory / _EXTRA).exists():
            text += f"include {_EXTRA}\n"
        log = self.directory / "redis.log"
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > _LOG_BYTES:
                log.replace(log.with_suffix(".log.1"))
        with self._guard:
            if self._closing.is_set() or self._lock is None or self._watchdog is None:
                return None
            (self.directory / "redis.conf").write_text(text, "utf-8")
            with log.open("ab") as said:
                said.write(_SEPARATOR.encode())
                said.flush()
                process = subprocess.Popen(  # noqa: S603 - what find_binary found, on our own settings
                    [binary.path, "redis.conf"],
                    cwd=self.directory,
                    umask=0o077,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    pass_fds=(self._lock,),
                    start_new_session=True,  # Ctrl-C is for the parent, which still needs it then
                )
            self._watchdog.watch(process.pid)
            self._process = process
            self.starts += 1
        return process

    def _ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server answers; False if it ends instead, or if this is being closed."""
        told = time.monotonic()
        pause = 0.002
        while process.poll() is None and not self._closing.is_set():
            if (answer := self._answer()) and not answer.startswith(b"-LOADING"):
                return True
            if time.monotonic() - told > _LONGEST_PAUSE:
                told = time.monotonic()
                _log.info("embedded Redis is loading its data")
            self._closing.wait(pause)
            pause = min(2 * pause, 0.05)
        return False

    def _answer(self) -> bytes:
        """Ask for a sign of life; empty if there is none within a second."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(1)
            try:
                asking.connect(str(self._socket))
                asking.sendall(b"PING\r\n")
                return asking.recv(100).rstrip()
            except OSError:
                return b""

    def _last_word(self) -> str:
        try:
            text = (self.directory / "redis.log").read_text("utf-8", "replace")
        except OSError:
            text = ""
        said = text.rpartition(_SEPARATOR)[2].splitlines()
        words = [word for line in said if (word := _STAMP.sub("", line).strip())]
        return " / ".join(words[-2:]) or "it said nothing"

    # Keep it running

    def _keep(self, binary: Binary, process: subprocess.Popen[bytes]) -> None:
        pause = _FIRST_PAUSE
        began = time.monotonic()
        while True:
            code = process.wait()
            if self._closing.is_set():
                return
            if self._watchdog is not None:
                self._watchdog.watch(0)
            if time.monotonic() - began > _STEADY_SECONDS:
                pause = _FIRST_PAUSE
            # What it said stays in its own log: a report of a crash can quote commands, payloads included.
            _log.error(
                "embedded Redis ended by itself, redis.log says more; it is started again",
                extra={"code": code, "url": self.url},
            )
            if self._closing.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE)
            began = time.monotonic()
            try:
                again = self._spawn(binary)
            except OSError as error:
                _log.error("embedded Redis cannot be started", extra={"reason": str(error)})
                continue
            if again is None:
                return
            process = again
            if self._ready(process):
                _log.info("embedded Redis is back", extra={"url": self.url})

    # End

    def close(self) -> None:
        """End it in order, what it was told being on disk then; let the directory go. Doing so again has no effect."""
        self._closing.set()
        with self._guard:
            process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a frozen one would not hear it
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _log.warning("embedded Redis does not end, and is killed")
                process.kill()
                process.wait()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._closing.set()
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                await asyncio.to_thread(self.close)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.close))


def _alive(pid: bytes) -> bool:
    try:
        os.kill(int(pid), 0)
    except ValueError:
        return True  # it is just being written
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _short_folder() -> str | None:
    """Return a folder for a socket where the usual one is too deep."""
    usual = tempfile.gettempdir()
    return None if len(os.fsencode(usual)) < _SOCKET_BYTES // 2 else "/tmp"  # noqa: S108 - mkdtemp is safe there
