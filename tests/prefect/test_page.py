"""Test of the commands on the page about Prefect replicas, from an empty database to a completed run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from taskqueue_redis.embedded.watchdog import Watchdog
from tests.binaries.folders import ROOT
from tests.prefect.environment import EXAMPLES
from tests.prefect.replicas import Site
from tests.redis.engines import find_engine
from tests.redis.reserved import reserve

PAGE = (ROOT / "docs" / "prefect.md").read_text()
PART = PAGE.split("## Servers of Prefect, with replicas\n", 1)[1].split("\n## ", 1)[0]
COMMANDS = re.findall(r"^\$ (.+)$", PART, re.MULTILINE)
PATIENCE = 240.0


def commands(beginning: str) -> list[str]:
    """Return the page's commands that start with this text."""
    return [command for command in COMMANDS if command.startswith(beginning)]


class Place:
    """Runs the page's commands, with other ports and folders than on the page."""

    def __init__(self, site: Site, folder: Path) -> None:
        """Copy the page's example programs to a folder, and reserve ports."""
        self._holds = {port: reserve() for port in ("4200", "4201", "6379")}
        self.ports = {port: str(hold.port) for port, hold in self._holds.items()}
        self._others = {**self.ports, "/tmp/": f"{folder}/"}  # noqa: S108 - the page uses this folder
        self.folder = folder
        binaries = folder / "bin"
        binaries.mkdir()
        (binaries / "redis-server").symlink_to(find_engine().binary)
        there = site.environment(
            "page",
            HOME=str(folder),
            PREFECT_API_DATABASE_MIGRATE_ON_START="true",
            TASKQUEUE_REDIS_URL=f"redis://127.0.0.1:{self.ports['6379']}",
            PYTHONPATH=str(ROOT / "src"),
        )
        own = Path(site.python).parent
        self.environment = {**there, "PATH": f"{binaries}:{own}:{os.environ['PATH']}"}
        shutil.copytree(EXAMPLES, folder / "examples")
        self._started: list[tuple[subprocess.Popen[bytes], Watchdog]] = []

    def run(self, lines: list[str]) -> str:
        """Run lines in one shell and return their output.

        Commands that run in the background may continue afterwards.
        """
        script = re.sub(
            "|".join(self._others), lambda found: self._others[found[0]], "\n".join(lines)
        )
        said, errors = self.folder / "said", self.folder / "errors"
        with said.open("wb") as out, errors.open("ab") as err:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", script],
                cwd=self.folder / "examples",
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        watchdog = Watchdog("KILL", group=True)
        watchdog.watch(shell.pid)
        self._started.append((shell, watchdog))
        code = shell.wait(PATIENCE)
        told = said.read_text()
        assert code == 0, told[-2000:] + errors.read_text()[-2000:]
        return told

    def close(self) -> None:
        """Kill everything that is still running."""
        for shell, watchdog in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            watchdog.close()
        for hold in self._holds.values():
            hold.release()


@pytest.fixture
def place(site: Site, tmp_path: Path) -> Iterator[Place]:
    """Yield a place for one test."""
    found = Place(site, tmp_path)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.long
def test_two_replicas_and_two_workers(place: Place) -> None:
    """Row E9: the page's commands start all programs and complete a run; other commands list runs and delete one."""
    redis, export, *servers = (
        *commands("redis-server "),
        *commands("export "),
        *commands("prefect server start "),
    )
    workers, (delay,) = commands("PREFECT_API_URL")[:2], commands("PREFECT_API_URL")[2:]
    five = [export, *servers, *workers]
    assert len(five) == 5
    said = place.run([redis, *five, delay])
    assert said.count("true") == 2
    assert said.count("Completed\n") == 1
    assert (place.folder / "examples" / "total").read_text() == "3"

    api = f"http://127.0.0.1:{place.ports['4200']}/api"
    body = {
        "task_key": "nobody-1",
        "dynamic_key": "1",
        "state": {"type": "SCHEDULED", "state_details": {"deferred": True}},
    }
    with httpx2.Client(base_url=api, trust_env=False) as client:
        run = client.post("/task_runs/", json=body).json()["id"]
        look, delete = commands("curl ")
        (found,) = json.loads(place.run([look]))
        assert (found["id"], found["state"]["state_details"]["deferred"]) == (run, True)
        place.run([re.sub(r"[0-9a-f-]{36}$", run, delete)])
        assert client.get(f"/task_runs/{run}").status_code == 404
        assert json.loads(place.run([look])) == []
