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
from typing import BinaryIO, Self, cast
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
"""matches the start of each line in the server's log: process id, role, time and level"""
_WRITER = re.compile(rb"\xfa.(redis|valkey)-ver.(\d+\.\d+\.\d+)", re.DOTALL)
"""matches the field of a base file that names the server which wrote the file"""
_SOCKET_BYTES = 100
"""maximum length in bytes of a Unix socket's path on every system; Linux allows 107, macOS 103"""
_LOG_BYTES = 1_000_000
_GRACE_SECONDS = 0.5
"""seconds to wait for a directory that a running process has locked"""
_LOCK_SECONDS = 15.0
"""seconds to wait if the process that locked the directory has ended: its watchdog is about to stop the server"""
_STOP_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_STEADY_SECONDS = 60.0
"""seconds without a crash after which the pause before the next restart is reset to its shortest value"""
_log = logging.getLogger("taskqueue.redis.embedded")


class EmbeddedRedis:
    """A private Redis server run by this process. Only this user can open its socket. Its files are in ``directory``.

    It runs from `start` to `close`, or as a context manager, plain or ``async``. If the server ends unexpectedly, it is
    restarted after a pause of up to 5 s. If this process ends without `close`, a watchdog ends the server. Two
    processes cannot use the same directory at the same time. A start that fails leaves nothing running. Methods block;
    the ``async`` context manager uses a thread.
    """

    def __init__(self, directory: Path | str, *, binary: Binary | None = None) -> None:
        """Create a server without starting it. ``binary``: the program to run; by default that of `find_binary`."""
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
        """number of times that the server was started; more than 1 after a crash or a second attempt"""

    @property
    def url(self) -> str:
        """URL for clients, which does not change when the server is restarted."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """The process id of the server; None if it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def name(self) -> str:
        """Product and version of the server, such as ``Valkey 9.1.2``; empty before the start."""
        return self._binary.name if self._binary else ""

    @property
    def _socket(self) -> Path:
        return (self._socket_folder or self.directory) / "redis.sock"

    def start(self) -> Self:
        """Start the server and wait until its data is loaded, however long that takes.

        Raises `ConfigurationError` if there is no server program, if the directory or its files cannot be used, or if
        the server ends; the error then contains the last lines of its log.
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
            # If Redis 7.0 has crashed while it rewrote its append-only file, only its second start succeeds.
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
                f"the directory {self.directory} cannot be created for the embedded store: {error.strerror}"
            ) from None
        if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise ConfigurationError(
                f"{self.directory} must belong to the current user, and no other user may "
                f"write to it: run chown, then chmod go-w {self.directory}"
            )

    def _lock_directory(self) -> None:
        """Lock the directory. The server inherits the lock, which therefore lasts until both processes have ended."""
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
                # If the owner has ended, its watchdog is about to end the server, so wait longer.
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
        """Write the ids of this process and of the server into the lock file, for error messages of other processes."""
        assert self._lock is not None  # noqa: S101 - all callers hold the lock
        with contextlib.suppress(OSError):  # the ids are needed only for an error message
            text = f"{os.getpid()} {self.pid or ''}\n".encode()
            os.ftruncate(self._lock, os.pwrite(self._lock, text, 0))

    def _refuse_newer_files(self, binary: Binary) -> None:
        # Versions of Redis before 7.0 ignore the folder appendonlydir, and would start without its data.
        if binary.version < (7, 0) and (self.directory / "appendonlydir").exists():
            writer = self._writer() or "Valkey, or by Redis 7.0 or newer"
            raise ConfigurationError(
                f"{self.directory} was written by {writer}, and {binary.name} cannot read it: install that version or "
                "a newer one, or choose another directory"
            )

    def _writer(self) -> str:
        """Return the name of the server that wrote the base file, such as ``Valkey 9.1.2``; empty if unknown."""
        for base in (self.directory / "appendonlydir").glob("*.base.rdb"):
            with base.open("rb") as file:
                if match := _WRITER.search(file.read(100)):
                    return f"{match[1].decode().title()} {match[2].decode()}"
        return ""

    def _spawn(self, binary: Binary) -> subprocess.Popen[bytes] | None:
        """Start the server; return None if `close` was called."""
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
            with _open_private(settings, "wb") as file:
                file.write(text.encode())
            with settings.open("rb") as read, _open_private(log, "ab") as output:
                output.write(_SEPARATOR.encode())
                output.flush()
                process = subprocess.Popen(  # noqa: S603 - it runs only the program that find_binary has found
                    # Pass the settings on stdin, because Redis would interpret wildcards such as "*" in a path.
                    [binary.path, "-"],
                    cwd=self.directory,
                    umask=0o077,
                    stdin=read,
                    stdout=output,
                    stderr=output,
                    pass_fds=(self._lock,),
                    start_new_session=True,  # otherwise Ctrl-C would end the server before this process
                )
            self._watchdog.watch(process.pid)
            self._process = process
            self._name_holders()
            self.starts += 1
        return process

    def _ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server answers. Return False if the server ends first, or if `close` is called."""
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
        """Send a PING and return the answer; empty if there is no answer within a second."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(1)
            try:
                asking.connect(str(self._socket))
                asking.sendall(b"PING\r\n")
                return asking.recv(100).rstrip()
            except OSError:
                return b""

    def _last_log_lines(self, binary: Binary) -> str:
        """Return the last lines of the server's log. If its files could not be read, add which server wrote them."""
        try:
            text = (self.directory / "redis.log").read_text("utf-8", "replace")
        except OSError:
            text = ""
        lines = text.rpartition(_SEPARATOR)[2].splitlines()
        args = [name for line in lines if (name := _STAMP.sub("", line).strip())][-2:]
        # If a base file cannot be read, Redis 7.0 logs the file's name; later versions and Valkey log "RDB base file".
        if any("RDB base file" in name or ".base.rdb" in name for name in args):
            writer = self._writer()
            if writer not in {"", binary.name}:
                args.append(
                    f"the files were written by {writer}: install that version or a newer one, or choose another "
                    "directory"
                )
        return " / ".join(args) or "its log is empty"

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
            # Do not log the last lines of redis.log here, because a crash report can quote commands with payloads.
            _log.error(
                "embedded %s exited unexpectedly and is being restarted; see redis.log",
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

    def close(self) -> None:
        """End the server, which saves all confirmed writes; kill it after 30 s. Unlock the directory. Idempotent."""
        self._closing.set()
        self._cleanup.close()

    def _end_server(self) -> None:
        with self._guard:
            process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            process.send_signal(
                signal.SIGCONT
            )  # a process that is stopped by SIGSTOP does not handle SIGTERM
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
    """Return a folder with a short path for a socket; None if the default temporary folder is short enough."""
    usual = tempfile.gettempdir()
    return None if len(os.fsencode(usual)) < _SOCKET_BYTES // 2 else "/tmp"  # noqa: S108 - mkdtemp creates a private folder there


def _open_private(path: Path, mode: str) -> BinaryIO:
    """Open a file that only its owner can access, even if it existed before."""

    def opener(name: str, flags: int) -> int:
        number = os.open(name, flags, 0o600)
        os.fchmod(number, 0o600)
        return number

    return cast("BinaryIO", open(path, mode, opener=opener))
