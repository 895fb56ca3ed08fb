"""A private Valkey or Redis server with an append-only file: durable on one machine, without any setup."""

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
from typing import Self
from urllib.parse import quote

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.embedded.binaries import Binary, find_binary
from taskqueue_redis.embedded.watchdog import Watchdog

_SETTINGS = """# This file is written at each start. Put your own settings into {extra} in this folder.
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
"""such as "4711:M 21 Nov 2026 12:00:00.000 # ", at the start of each line that the server logs"""
_WRITER = re.compile(rb"\xfa.(redis|valkey)-ver.(\d+\.\d+\.\d+)", re.DOTALL)
"""the field of a base file that names the server that wrote it"""
_SOCKET_BYTES = 100
"""the longest path that every system accepts for a Unix socket: Linux has room for 107 bytes, macOS for 103"""
_LOG_BYTES = 1_000_000
_GRACE_SECONDS, _LOCK_SECONDS = 0.5, 15.0
"""how long to wait for a locked directory: while its process runs, and after only its server is left"""
_STOP_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_STEADY_SECONDS = 60.0
"""after so long a run, the pause before a restart is short again"""
_log = logging.getLogger("taskqueue.redis.embedded")


class EmbeddedRedis:
    """A server of this process, on a Unix socket that only this user can open, with its files in ``directory``.

    It runs from `start` to `close` (or as a context, plain or ``async``). If it ends by itself, it is
    started again after a pause that grows to 5 s. `close` ends it in order. If this process ends
    without `close`, a watchdog ends the server. Two processes never have the same directory open.
    A start that fails leaves nothing behind. Methods block; the ``async`` context uses a thread.
    """

    def __init__(self, directory: Path | str, *, binary: Binary | None = None) -> None:
        """Start nothing yet. Without a ``binary``, `find_binary` looks for one at the start."""
        self.directory = Path(directory).expanduser().absolute()
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        self._keeper: threading.Thread | None = None
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._cleanup = contextlib.ExitStack()
        self._lock: int | None = None
        self._socket_folder: Path | None = None
        self.starts = 0
        """how often the server was started; more than 1 after it has crashed"""

    @property
    def url(self) -> str:
        """Where clients connect; the same over restarts."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """The process id of the server; None while it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def name(self) -> str:
        """Product and version of the server, such as ``Valkey 9.1.2``; empty before the start."""
        return self._binary.name if self._binary else ""

    @property
    def _socket(self) -> Path:
        return (self._socket_folder or self.directory) / "redis.sock"

    # Start

    def start(self) -> Self:
        """Start the server and wait until its data is loaded, however long that takes.

        Raises `ConfigurationError` if there is no server program, if the directory is not this user's
        or is open in another process, and if the server ends instead, with the last lines of its log.
        """
        try:
            self._start()
        except OSError as error:
            self.close()
            named = f" ({error.filename})" if error.filename else ""
            raise ConfigurationError(
                f"{self.name} cannot be started in {self.directory}: {error.strerror or error}{named}"
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        self._binary = binary = self._binary or find_binary()
        self._prepare_directory()
        self._lock_directory()
        self._refuse_newer_files(binary)
        if len(os.fsencode(self._socket)) > _SOCKET_BYTES:
            self._socket_folder = Path(
                tempfile.mkdtemp(prefix="taskqueue-redis-", dir=_short_folder())
            )
            self._cleanup.callback(shutil.rmtree, self._socket_folder, ignore_errors=True)
        self._watchdog = Watchdog("TERM")
        self._cleanup.callback(self._watchdog.close)
        self._cleanup.callback(self._end_server)
        process = self._spawn(binary)
        if process is not None and not self._ready(process):
            # After a crash while it rewrote its file, Redis 7.0 refuses the first start and accepts the second.
            process = self._spawn(binary)
        if process is None or not self._ready(process):
            raise ConfigurationError(
                f"{binary.name} did not start in {self.directory}: {self._last_log_lines(binary)}"
            )
        _log.info("embedded %s started", binary.name, extra={"url": self.url})
        self._keeper = threading.Thread(
            target=self._supervise, args=(binary, process), name="taskqueue-redis", daemon=True
        )
        self._keeper.start()

    def _prepare_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.directory.stat()
        except OSError as error:
            raise ConfigurationError(
                f"the directory {self.directory} cannot be made for the embedded store: {error.strerror}"
            ) from None
        if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise ConfigurationError(
                f"{self.directory} must belong to the current user, and no other user may "
                f"write to it: run chown, then chmod go-w {self.directory}"
            )

    def _lock_directory(self) -> None:
        """Lock the directory. The server inherits the lock, so it holds until both processes have ended."""
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._cleanup.callback(os.close, lock)
        began = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                owner, _, server = (
                    os.pread(lock, 40, 0).decode("ascii", "replace").strip().partition(" ")
                )
                # If only the server is left, its watchdog is ending it.
                patience = _GRACE_SECONDS if _alive(owner) else _LOCK_SECONDS
                if time.monotonic() - began > patience or self._closing.is_set():
                    holder = owner if _alive(owner) else server
                    raise ConfigurationError(
                        f"{self.directory} is in use by process {holder or '?'}: stop that "
                        "process, or choose another directory"
                    ) from None
                time.sleep(0.02)
        self._lock = lock
        self._name_holders()

    def _name_holders(self) -> None:
        """Write the ids of this process and the server into the lock file, for the error message of other processes."""
        assert self._lock is not None  # noqa: S101 - called only with the lock
        with contextlib.suppress(OSError):  # it is for an error message only
            text = f"{os.getpid()} {self.pid or ''}\n".encode()
            os.ftruncate(self._lock, os.pwrite(self._lock, text, 0))

    def _refuse_newer_files(self, binary: Binary) -> None:
        # Redis before 7.0 does not look into this folder, and would begin with no data.
        if binary.version < (7, 0) and (self.directory / "appendonlydir").exists():
            writer = self._writer() or "Valkey, or by Redis 7.0 or newer"
            raise ConfigurationError(
                f"{self.directory} was written by {writer}, and {binary.name} cannot read it: install that version or "
                "a newer one, or choose another directory"
            )

    def _writer(self) -> str:
        """Return which server wrote the base file, such as ``Valkey 9.1.2``; empty if that is not known."""
        for base in (self.directory / "appendonlydir").glob("*.base.rdb"):
            with base.open("rb") as file:
                if match := _WRITER.search(file.read(100)):
                    return f"{match[1].decode().title()} {match[2].decode()}"
        return ""

    def _spawn(self, binary: Binary) -> subprocess.Popen[bytes] | None:
        """Start the server, unless this is being closed."""
        path = self._socket if self._socket_folder else self._socket.name
        text = _SETTINGS.format(extra=_EXTRA, socket=f'"{path}"')
        if (self.directory / _EXTRA).exists():
            text += f"include {_EXTRA}\n"
        log = self.directory / "redis.log"
        with contextlib.suppress(FileNotFoundError):
            if log.stat().st_size > _LOG_BYTES:
                log.replace(log.with_suffix(".log.1"))
        with self._guard:
            if self._closing.is_set() or self._lock is None or self._watchdog is None:
                return None
            settings = self.directory / "redis.conf"
            settings.write_text(text, "utf-8")
            with settings.open("rb") as read, log.open("ab") as output:
                output.write(_SEPARATOR.encode())
                output.flush()
                process = subprocess.Popen(  # noqa: S603 - the program of find_binary, with our own settings
                    # By name the file would be looked up with wildcards, which the directory may contain.
                    [binary.path, "-"],
                    cwd=self.directory,
                    umask=0o077,
                    stdin=read,
                    stdout=output,
                    stderr=output,
                    pass_fds=(self._lock,),
                    start_new_session=True,  # Ctrl-C ends the parent, which still needs the server then
                )
            self._watchdog.watch(process.pid)
            self._process = process
            self._name_holders()
            self.starts += 1
        return process

    def _ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server answers; return False if it ends instead, or if this is being closed."""
        logged = time.monotonic()
        pause = 0.002
        while process.poll() is None and not self._closing.is_set():
            if (answer := self._answer()) and not answer.startswith(b"-LOADING"):
                return True
            if time.monotonic() - logged > _LONGEST_PAUSE:
                logged = time.monotonic()
                _log.info("embedded %s is loading its data", self.name)
            self._closing.wait(pause)
            pause = min(2 * pause, 0.05)
        return False

    def _answer(self) -> bytes:
        """Send a PING and return the answer; empty if there is none within a second."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(1)
            try:
                asking.connect(str(self._socket))
                asking.sendall(b"PING\r\n")
                return asking.recv(100).rstrip()
            except OSError:
                return b""

    def _last_log_lines(self, binary: Binary) -> str:
        """Return the last lines of the server's log, and which server wrote files that it cannot read."""
        try:
            text = (self.directory / "redis.log").read_text("utf-8", "replace")
        except OSError:
            text = ""
        lines = text.rpartition(_SEPARATOR)[2].splitlines()
        args = [name for line in lines if (name := _STAMP.sub("", line).strip())][-2:]
        # Redis 7.0 names the file; later servers and Valkey say that it is an RDB base file.
        if any("RDB base file" in name or ".base.rdb" in name for name in args):
            writer = self._writer()
            if writer not in {"", binary.name}:
                args.append(
                    f"the files were written by {writer}: install that version or a newer one, or choose another "
                    "directory"
                )
        return " / ".join(args) or "its log is empty"

    # Keep it running

    def _supervise(self, binary: Binary, process: subprocess.Popen[bytes]) -> None:
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
            # Its last lines are not logged here: a crash report can quote commands with payloads.
            _log.error(
                "embedded %s exited unexpectedly and is restarted; see redis.log",
                binary.name,
                extra={"code": code, "url": self.url},
            )
            if self._closing.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE)
            began = time.monotonic()
            try:
                again = self._spawn(binary)
            except OSError as error:
                _log.error(
                    "embedded %s cannot be started", binary.name, extra={"reason": str(error)}
                )
                continue
            if again is None:
                return
            process = again
            if self._ready(process):
                _log.info("embedded %s is running again", binary.name, extra={"url": self.url})

    # End

    def close(self) -> None:
        """End the server in order, so that all it confirmed is on disk, and unlock the directory.

        A second call has no effect.
        """
        self._closing.set()
        self._cleanup.close()

    def _end_server(self) -> None:
        with self._guard:
            process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a stopped process does not act on SIGTERM
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _log.warning("embedded %s did not stop in time and was killed", self.name)
                process.kill()
                process.wait()
        if self._keeper is not None:
            self._keeper.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
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

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.to_thread(self.close))


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ValueError:
        return True  # the process is writing its id at this moment
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _short_folder() -> str | None:
    """Return a folder for a socket; None for the usual one, if its path is short enough."""
    usual = tempfile.gettempdir()
    return None if len(os.fsencode(usual)) < _SOCKET_BYTES // 2 else "/tmp"  # noqa: S108 - mkdtemp is safe there
