"""Tests with real Prefect workers and a real server of this project, in separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx2
import pytest

from tests.prefect.environment import EXAMPLES, PROGRAMS
from tests.prefect.replicas import Process
from tests.redis.reserved import reserve
from tests.redis.servers import wait_until
from tests.server.access import entry, write

SECONDS = 60.0
TOKEN = "tq_of-a-worker-of-prefect"
NARROW = "tq_of-one-for-other-keys"


class Place:
    """The folder, address and Python interpreter of a test, with helpers that use Prefect."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python = python
        self.folder = folder
        self.hold = reserve()
        self.url = f"http://127.0.0.1:{self.hold.port}"
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.client = httpx2.Client(base_url=self.url, trust_env=False)

    def environment(self, token: str | None = None) -> dict[str, str]:
        """Return the environment for a program that uses Prefect, without variables of this process except PATH."""
        shown = {} if token is None else {"PREFECT_API_AUTH_STRING": token}
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{PROGRAMS}{os.pathsep}{EXAMPLES}",
            "PYTHONUNBUFFERED": "1",
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_LOGGING_TO_API_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            **shown,
        }

    def run(self, program: Path, *words: str, token: str | None = None) -> str:
        """Run a program that uses Prefect to its end, and return its output."""
        done = subprocess.run(
            [self.python, str(program), *words],
            cwd=self.folder,
            env=self.environment(token),
            capture_output=True,
            text=True,
            timeout=2 * SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def runs(self, gates: dict[str, str]) -> list[dict[str, Any]]:
        """Return the parameters of runs that record their name in a file once their gate file exists."""
        folder = str(self.marks)
        return [{"folder": folder, "name": name, "gate": gate} for name, gate in gates.items()]

    def give(self, *runs: dict[str, Any]) -> tuple[str, Any]:
        """Submit runs, and return the task key and the runs' ids."""
        key, ids = json.loads(self.run(PROGRAMS / "give.py", json.dumps(runs)))
        return key, ids

    def marked(self) -> dict[str, int]:
        """Return how often each run was executed."""
        counts = {file.name: len(file.read_text().split()) for file in self.marks.iterdir()}
        return {name: count for name, count in counts.items() if count}  # gate files are empty

    def status(self, key: str, run: str) -> dict[str, Any]:
        """Return the status of a run in the queue."""
        answer = self.client.get(f"/v1/tasks/{key}/{run}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ledger(self, key: str) -> dict[str, int]:
        """Return the ledger of a queue."""
        found: dict[str, int] = self.client.get(f"/v1/queues/{key}").json()["ledger"]
        return found

    def reaches(self, key: str, **counts: int) -> None:
        """Wait until the ledger of a queue has these counts."""

        def there() -> bool:
            seen.update(self.ledger(key))
            return all(seen[name] == count for name, count in counts.items())

        seen: dict[str, int] = {}
        try:
            wait_until(there, f"{counts}", seconds=SECONDS, tick=0.1)
        except AssertionError as error:
            error.add_note(f"the queue has {seen}, marks {self.marked()}")
            raise


class Own(NamedTuple):
    """The Python environment of this project, which has no Prefect."""

    folder: Path
    python: str = sys.executable


class Server(Process):
    """A server of this project. As a context manager it waits until the server is ready."""

    def __init__(self, place: Place, backend: str) -> None:
        words = ["-m", "taskqueue_cli", "serve", "--backend", backend]
        port = ["--port", str(place.hold.port)]
        super().__init__(Own(place.folder), "server", [*words, *port], os.environ)
        self._client = place.client

    def ready(self) -> Self:
        """Wait until the server responds."""

        def answers() -> bool:
            assert self.code is None, self.log[-2000:]
            try:
                return self._client.get("/ready").status_code == 200
            except httpx2.TransportError:
                return False

        wait_until(answers, "the server answers", seconds=SECONDS)
        return self


class Worker(Process):
    """The process of a Prefect worker."""

    def __init__(self, place: Place, name: str, *words: str, token: str | None = None) -> None:
        command = [*words] if words else [str(PROGRAMS / "work.py"), "1"]
        super().__init__(place, name, command, place.environment(token))

    def is_well(self) -> bool:
        """Return whether the worker is running and has logged no warning or error."""
        return self.code is None and not any(
            word in self.log for word in ("WARN", "ERROR", "Traceback")
        )


@pytest.fixture
def place(prefect_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yield a place for one test, with all settings of the machine removed from the environment."""
    for name in os.environ:
        if name.startswith(("TASKQUEUE_", "PREFECT_")):
            monkeypatch.delenv(name)
    made = Place(prefect_python, tmp_path)
    with made.client:
        yield made
    made.hold.release()


@pytest.fixture
def durable(redis_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a backend with durable data, and set a short lease."""
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    monkeypatch.setenv("TASKQUEUE_REDIS_LEASE", "1")
    return "redis"


def test_workers_survive_poison_and_restarts(place: Place, durable: str) -> None:
    """E7, REV-E3, faults A6, A7, F20: workers share the runs, and get no unreadable one.

    No run is lost when the server is killed or stopped while runs are unacked.
    """
    with Worker(place, "one") as one, Worker(place, "other") as other:
        with Server(place, durable) as server:
            names = [f"n{number}" for number in range(8)]
            later = {name: f"gate-{name}" for name in "abcdefghi"}
            gates = dict.fromkeys(names, "gate") | later
            key, ids = place.give(*place.runs(gates))
            # Each worker executes a run, has acked another one that waits for it, and has received a third without an
            # ack.
            place.reaches(key, done=4, in_flight=2, waiting=11)
            for payload in ({"id": "x"}, {"task_key": key, "state": None}, "ack", None):
                body = {"key": key, "payload": payload, "priority": 9}
                assert place.client.post("/v1/tasks", json=body).status_code == 201
            (place.marks / "gate").touch()
            place.reaches(key, done=12, in_flight=2, waiting=3, dead=4)
            ran = [(place.marks / name).read_text().strip() for name in names]
            for worker in (one, other):
                assert ran.count(str(worker.pid)) >= 3
                assert worker.is_well(), worker.log
            # Which of the later runs are acked depends on the workers' timing.
            states = {
                gate: place.status(key, run)["state"]
                for gate, run in zip(gates.values(), ids, strict=True)
                if gate != "gate"
            }
            acked = [gate for gate, state in states.items() if state == "done"]
            assert len(acked) == 4
            server.kill()
        with Server(place, durable) as server:
            place.reaches(key, done=12, in_flight=0, waiting=5)
            for gate in acked:
                (place.marks / gate).touch()
            place.reaches(key, done=16, in_flight=1)
            (held,) = [run for run in ids if place.status(key, run)["state"] == "in_flight"]
            before = place.status(key, held)
            assert server.stop() == 0
        with Server(place, durable):
            place.reaches(key, done=16, in_flight=0, waiting=1)
            after = place.status(key, held)
            counted = [(one["attempt"], one["losses"]) for one in (before, after)]
            assert counted[0] == counted[1]
            assert after["attempt"] == 1
            for gate in later.values():
                (place.marks / gate).touch()
            place.reaches(key, done=17)
            everything = dict.fromkeys(gates, 1)
            wait_until(
                lambda: place.marked() == everything, "every run is executed once", seconds=SECONDS
            )
            assert (one.code, other.code) == (None, None)


def test_the_example_and_tokens(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security 1 and 2: the page's example works.

    An invalid token ends a worker, and one for other keys gives it no runs.
    """
    tokens = write(
        place.folder / "tokens.toml",
        entry(TOKEN, "worker", ["consume", "publish"], ["count-*"]),
        entry(NARROW, "other", ["consume"], ["sub-*"]),
    )
    monkeypatch.setenv("TASKQUEUE_TOKENS_FILE", str(tokens))
    example = str(EXAMPLES / "tasks.py")
    counted = place.folder / "count.txt"
    with (
        Server(place, "taskqueue_memory"),
        Worker(place, "wrong", example, token="wrong") as wrong,
        Worker(place, "other", example, token=NARROW) as other,
    ):
        run = place.run(EXAMPLES / "submit.py", token=TOKEN).strip()
        wait_until(lambda: wrong.code is not None, "the worker ends", seconds=SECONDS)
        assert wrong.code != 0
        assert "Unable to authenticate" in wrong.log
        assert "a valid token is required" in wrong.log
        wait_until(lambda: "Subscribing" in other.log, "the worker starts", seconds=SECONDS)
        assert not counted.exists()
        with Worker(place, "right", example, token=TOKEN) as right:
            wait_until(lambda: "Completed" in right.log, "the run is completed", seconds=SECONDS)
            assert counted.read_text() == "3"
            assert run in right.log
            assert right.is_well(), right.log
        assert other.code is None
        assert "Received" not in other.log
