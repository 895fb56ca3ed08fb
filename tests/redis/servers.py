"""Real redis-server children that tests start, freeze, kill and start again: each by its own id."""

from __future__ import annotations

import contextlib
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
    "repl-diskless-sync-delay": "0",  # else a replica's first sync waits 5 s for others
    "repl-diskless-load": "on-empty-db",  # else Valkey 9.1 says after a second that it is in step
    "repl-ping-replica-period": "1",
    "repl-timeout": "10",
    "hz": "50",
}


def wait_until(
    holds: Callable[[], bool], what: str, *, seconds: float = _PATIENCE, tick: float = 0.01
) -> None:
    """Wait until a condition holds; an `OSError` or `RedisError` within it counts as not yet."""
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
    """Use it as a context, or call `start` and `close`. What could not start has closed itself."""

    def start(self) -> Self:
        """Start it, and wait until it is of use."""
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
        """End it, also if it never was of use."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


class RedisServer(Startable):
    """One redis-server on a port of its own, kept over restarts. It ends with the test process, however that ends.

    ``aof``: whether it keeps an append-only file. ``config``: more settings. ``acl``: lines for an
    ACL file. ``sentinel``: run it as a Sentinel on ``config``.
    Starting and stopping block, briefly; `call` asks it on a connection of its own.
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
        """Hold a port and write the configuration; nothing runs yet. ``folder`` is made, and holds all of its files."""
        self.engine = engine
        self.folder = folder
        self.config = {} if sentinel else {**_BASE, "appendonly": "yes" if aof else "no"}
        self.config |= config or {}
        self.arguments = ["--sentinel"] if sentinel else []
        self.login: tuple[str, str] | None = None
        """user and password that `call` and `connect` show"""
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if acl is not None:
            (folder / "users.acl").write_text(acl)
            self.config["aclfile"] = str(folder / "users.acl")
        self._hold = reserve()
        self.config.setdefault("port", str(self.port))

    # Where it is

    @property
    def port(self) -> int:
        """Its port, also while it does not run."""
        return self._hold.port

    @property
    def url(self) -> str:
        """Its URL, with the `login`."""
        login = "{}:{}@".format(*self.login) if self.login else ""
        return f"redis://{login}127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The id of the running child."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    # What is done to it

    def start(self, *, wait: bool = True) -> Self:
        """Start it and wait until it answers, with its data loaded; ``wait=False`` returns at once."""
        super().start()
        return self.ready() if wait else self

    def _start(self) -> None:
        assert not self.running
        lines = [f"{name} {value}" for name, value in self.config.items()]
        path = self.folder / "redis.conf"
        if not (self.arguments and path.exists()):  # a Sentinel keeps what it learns in its own
            path.write_text("\n".join([*lines, f"dir {self.folder}", f"logfile {self.log_path}"]))
        if self._watchdog is None:
            self._watchdog = Watchdog("KILL")
        self._process = subprocess.Popen(
            [self.engine.binary, path, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the test run, which then ends this in order
        )
        self._watchdog.watch(self.pid)

    def ready(self) -> Self:
        """Wait until it answers, with its data loaded. If it does not, it is closed."""
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
        """End it in order (SIGTERM), and insist with SIGKILL after a while."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash would."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Hold it still (SIGSTOP): its sockets stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def restart(self) -> Self:
        """Stop it in order if it runs, and start it on the same port and files."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """End it, and give its port back."""
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
        process.send_signal(signal.SIGCONT)  # a frozen one would not hear it
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._watchdog is not None:
            self._watchdog.watch(0)
        self._process = None

    # What it says

    def connect(self, *, timeout: float = 5.0) -> Resp:
        """Open a connection to it. Raises `OSError` and `RedisError`."""
        connection = Resp(("127.0.0.1", self.port), timeout=timeout)
        if self.login is not None:
            connection.call("AUTH", *self.login)
        return connection

    def call(self, *words: str | bytes | float) -> Any:
        """Send one command on a connection of its own; return the reply. Raises `OSError` and `RedisError`."""
        with contextlib.closing(self.connect()) as connection:
            return connection.call(*words)

    def info(self, section: str = "everything") -> dict[str, str]:
        """Return what INFO tells."""
        lines = self.call("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def whole(self) -> bool:
        """Whether its file has nothing at its end that a kill may have torn: written anew since its start, or new."""
        told = self.info("persistence")
        size = "aof_base_size" if self.engine.version < (7, 0) else "aof_current_size"
        began_empty = told[size] == "0"
        if told["aof_enabled"] == "0" or began_empty:
            return told["loading"] == "0"
        over = told["aof_rewrite_in_progress"] == "0" and told["aof_last_bgrewrite_status"] == "ok"
        return over and told["aof_last_rewrite_time_sec"] != "-1"

    @property
    def log_path(self) -> Path:
        """Where its log is."""
        return self.folder / "redis.log"

    def log(self) -> str:
        """Return what it has logged, over all of its starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
