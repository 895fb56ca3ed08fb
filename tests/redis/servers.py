"""redis-server child processes that tests can start, freeze, kill and restart."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from taskqueue_redis.embedded.watchdog import Watchdog
from tests.redis.engines import Engine
from tests.redis.reserved import reserve
from tests.redis.resp import RedisError, Resp

_PATIENCE = 20.0
_BASE = {
    "bind": "127.0.0.1",
    "protected-mode": "no",
    "save": '""',
    "appendfsync": "everysec",
    "maxmemory-policy": "noeviction",
    "daemonize": "no",
    # With the default, the first sync of a replica waits 5 s for other replicas.
    "repl-diskless-sync-delay": "0",
    # With the default, Valkey 9.1 reports a replica as in sync only after a second.
    "repl-diskless-load": "on-empty-db",
    "repl-ping-replica-period": "1",
    "repl-timeout": "10",
    "hz": "50",
}


def wait_until(
    holds: Callable[[], bool], what: str, *, seconds: float = _PATIENCE, tick: float = 0.01
) -> None:
    """Wait until a condition holds; an `OSError` or `RedisError` while checking it means that it does not hold yet."""
    end = time.monotonic() + seconds
    while True:
        seen = "false"
        try:
            if holds():
                return
        except (OSError, RedisError) as error:
            seen = f"{type(error).__name__}: {error}"
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what} (last seen: {seen})")
        time.sleep(tick)


class Startable(ABC):
    """A server, or group of servers, to be used as a context or with `start` and `close`.

    If starting fails, it is closed.
    """

    def start(self) -> Self:
        """Start the server or group of servers, and wait until it is ready."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Stop the server or group of servers, also if it never became ready."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


class RedisServer(Startable):
    """A redis-server process with a reserved port, which it keeps over restarts. It ends with the test process.

    ``aof`` sets whether it keeps an append-only file, ``config`` adds settings, and ``acl`` is the content of an
    ACL file. With ``sentinel``, it runs as a Sentinel with ``config`` alone. Starting and stopping block for a
    short time; `call` opens a connection for each command.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        aof: bool = True,
        config: Mapping[str, str] | None = None,
        acl: str | None = None,
        sentinel: bool = False,
    ) -> None:
        """Reserve a port and prepare the configuration in ``folder``, without starting the server."""
        self.engine = engine
        self.folder = folder
        self.config = {} if sentinel else {**_BASE, "appendonly": "yes" if aof else "no"}
        self.config |= config or {}
        self.arguments = ["--sentinel"] if sentinel else []
        self.environment: Mapping[str, str] = {}
        """environment variables of the server, in addition to those of this process"""
        self.login: tuple[str, str] | None = None
        """user name and password that `call` and `connect` use"""
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if acl is not None:
            (folder / "users.acl").write_text(acl)
            self.config["aclfile"] = str(folder / "users.acl")
        self._hold = reserve()
        self.config.setdefault("port", str(self.port))

    @property
    def port(self) -> int:
        """The reserved port, also while the server is stopped."""
        return self._hold.port

    @property
    def url(self) -> str:
        """The URL of the server, with the user name and password of `login`."""
        login = "{}:{}@".format(*self.login) if self.login else ""
        return f"redis://{login}127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> Self:
        """Start the server and wait until it answers with its data loaded; with ``wait=False``, return at once."""
        super().start()
        return self.ready() if wait else self

    def _start(self) -> None:
        assert not self.running
        lines = [f"{name} {value}" for name, value in self.config.items()]
        path = self.folder / "redis.conf"
        # A Sentinel stores its state in its configuration file, which must not be overwritten.
        if not (self.arguments and path.exists()):
            path.write_text("\n".join([*lines, f"dir {self.folder}", f"logfile {self.log_path}"]))
        if self._watchdog is None:
            self._watchdog = Watchdog("KILL")
        self._process = subprocess.Popen(
            [self.engine.binary, path, *self.arguments],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # In its own session, the server is not stopped by Ctrl-C before the test run has closed it.
            start_new_session=True,
        )
        self._watchdog.watch(self.pid)

    def ready(self) -> Self:
        """Wait until the server answers with its data loaded. If it does not, close it and raise `TimeoutError`."""
        try:
            wait_until(self._answers, "the server is ready", tick=0.003)
        except BaseException as error:
            self.close()
            if not isinstance(error, TimeoutError):
                raise
            raise TimeoutError(f"{error}; it logged:\n{self.log()[-2000:]}") from None
        return self

    def _answers(self) -> bool:
        if not self.running:
            raise AssertionError(f"{self.engine} ended by itself; it logged:\n{self.log()[-2000:]}")
        try:
            return bool(self.call("PING") == "PONG")
        except RedisError as error:
            return str(error).startswith(("NOAUTH", "NOPERM", "MASTERDOWN", "WRONGPASS"))

    def stop(self) -> None:
        """Stop the server with SIGTERM, or with SIGKILL if it does not end in time."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server with SIGKILL, as in a crash."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Freeze the server with SIGSTOP: its sockets stay open, but it answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server continue, with SIGCONT."""
        self._signal(signal.SIGCONT)

    def restart(self) -> Self:
        """Stop the server if it is running, and start it again on the same port and files."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """Kill the server and release its port."""
        self.kill()
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        self._hold.release()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)  # because a frozen process does not handle SIGTERM
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._watchdog is not None:
            self._watchdog.watch(0)
        self._process = None

    def connect(self, *, timeout: float = 5.0) -> Resp:
        """Open a connection to the server, with its `login`. Raises `OSError` and `RedisError`."""
        connection = Resp(("127.0.0.1", self.port), timeout=timeout)
        if self.login is not None:
            connection.call("AUTH", *self.login)
        return connection

    def call(self, *words: str | bytes | float) -> Any:
        """Send one command on a new connection, and return the reply. Raises `OSError` and `RedisError`."""
        with contextlib.closing(self.connect()) as connection:
            return connection.call(*words)

    def info(self, section: str = "everything") -> dict[str, str]:
        """Return the fields of the server's INFO reply."""
        lines = self.call("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def whole(self) -> bool:
        """Return whether the end of the append-only file is intact: the file is new, or rewritten since the start."""
        told = self.info("persistence")
        size = "aof_base_size" if self.engine.version < (7, 0) else "aof_current_size"
        began_empty = told[size] == "0"
        if told["aof_enabled"] == "0" or began_empty:
            return told["loading"] == "0"
        over = told["aof_rewrite_in_progress"] == "0" and told["aof_last_bgrewrite_status"] == "ok"
        return over and told["aof_last_rewrite_time_sec"] != "-1"

    @property
    def log_path(self) -> Path:
        """The path of the server's log file."""
        return self.folder / "redis.log"

    def log(self) -> str:
        """Return the log of the server, over all of its starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
