"""A real task worker of Prefect, in a process of its own, and a real server in another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest

from tests.cli.processes import process
from tests.ports import free_port
from tests.prefect.environment import EXAMPLES, PROGRAMS
from tests.redis.servers import wait_until
from tests.server.access import entry, write

SECONDS = 60.0
TOKEN = "tq_of-a-worker-of-prefect"
NARROW = "tq_of-one-for-other-keys"


class Place:
    """Where everything of a test is: a folder, an address, and Prefect."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python = python
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.marks = folder / "marks"
        self.marks.mkdir()
        self.client = httpx2.Client(base_url=self.url, trust_env=False)

    @contextmanager
    def server(self, backend: str) -> Iterator[subprocess.Popen[bytes]]:
        """A server that listens."""
        words = ("serve", "--port", str(self.port), "--backend", backend)
        with process(*words, stderr=subprocess.DEVNULL) as started:
            assert started.stdout is not None
            assert json.loads(started.stdout.readline())["url"] == self.url
            yield started

    def environment(self, token: str | None = None) -> dict[str, str]:
        """For programs that use Prefect; nothing of this process's own is in it."""
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
        """Run a program that uses Prefect to its end, and return what it says."""
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

    def runs(self, *names: str, **parameters: Any) -> list[dict[str, Any]]:
        """The parameters of runs that leave marks with these names."""
        return [{"folder": str(self.marks), "name": name, **parameters} for name in names]

    def give(self, *runs: dict[str, Any]) -> tuple[str, Any]:
        """Submit runs; return the key and the ids."""
        key, ids = json.loads(self.run(PROGRAMS / "give.py", json.dumps(runs)))
        return key, ids

    def marked(self) -> dict[str, int]:
        """How often each was run."""
        counts = {file.name: len(file.read_text().split()) for file in self.marks.iterdir()}
        return {name: count for name, count in counts.items() if count}  # gates are empty

    def ledger(self, key: str) -> dict[str, int]:
        """The counts of a queue."""
        found: dict[str, int] = self.client.get(f"/v1/queues/{key}").json()["ledger"]
        return found

    def reaches(self, key: str, **counts: int) -> None:
        """Wait for counts of a queue."""

        def there() -> bool:
            ledger = self.ledger(key)
            return all(ledger[name] == count for name, count in counts.items())

        wait_until(there, f"{counts}", seconds=SECONDS, tick=0.1)


class Worker:
    """A worker's process, and what it says."""

    def __init__(self, place: Place, name: str, *words: str, token: str | None = None) -> None:
        self.log = place.folder / f"{name}.log"
        program = words[0] if words else str(PROGRAMS / "work.py")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [place.python, program, *(words[1:] or ("1",))],
                cwd=place.folder,
                env=place.environment(token),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        """What it said."""
        return self.log.read_text()

    def is_well(self) -> bool:
        """Whether it runs and has nothing to complain of."""
        return self.process.poll() is None and not any(
            word in self.text for word in ("WARN", "ERROR", "Traceback")
        )


@pytest.fixture
def place(prefect_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place for a test; no settings of the machine reach it."""
    for name in os.environ:
        if name.startswith(("TASKQUEUE_", "PREFECT_")):
            monkeypatch.delenv(name)
    made = Place(prefect_python, tmp_path)
    with made.client:
        yield made


@pytest.fixture
def durable(redis_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend that outlives its server, with a short lease."""
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    monkeypatch.setenv("TASKQUEUE_REDIS_LEASE", "1")
    return "redis"


def test_it_survives_every_restart_of_the_server(place: Place, durable: str) -> None:
    """E7, REV-E3, fault A6, fault A7: kill -9 and SIGTERM, each with a delivery that has no ack: nothing is lost."""
    with Worker(place, "worker") as worker:
        with place.server(durable) as server:
            first = place.runs("a", "b", "c", "d", gate="first")
            key, ids = place.give(*first, *place.runs("e", "f", "g", gate="second"))
            # One runs, one has its ack and waits inside the worker, one has none, and the others have not been sent.
            place.reaches(key, done=2, in_flight=1, waiting=4)
            server.kill()
            server.wait()
        with place.server(durable) as server:
            place.reaches(key, done=2, in_flight=0, waiting=5)
            (place.marks / "first").touch()
            place.reaches(key, done=6, in_flight=1)
            server.send_signal(signal.SIGTERM)
            assert server.wait(10) == 0
        with place.server(durable):
            place.reaches(key, done=6, in_flight=0, waiting=1)
            status = place.client.get(f"/v1/tasks/{key}/{ids[6]}").json()
            assert (status["attempt"], status["losses"]) == (1, 0)
            (place.marks / "second").touch()
            place.reaches(key, done=7)
            wait_until(lambda: "g" in place.marked(), "the last is run")
            assert worker.process.poll() is None
    assert place.marked() == dict.fromkeys("abcdefg", 1)


def test_workers_share_and_survive_what_is_no_task_run(place: Place) -> None:
    """Fault F20: two workers take turns; poison reaches neither of them; and neither has anything to complain of."""
    names = [f"n{number}" for number in range(8)]
    with (
        place.server("taskqueue_memory"),
        Worker(place, "one") as one,
        Worker(place, "other") as other,
    ):
        key, _ = place.give(*place.runs(*names, gate="gate", seconds=0.2))
        # Each runs one, and has two more.
        place.reaches(key, done=4, in_flight=2, waiting=2)
        for payload in ({"id": "x"}, {"task_key": key, "state": None}, "ack", None):
            body = {"key": key, "payload": payload, "priority": 9}
            assert place.client.post("/v1/tasks", json=body).status_code == 201
        (place.marks / "gate").touch()
        place.reaches(key, done=8, dead=4)
        wait_until(lambda: len(place.marked()) == len(names), "all are run")
        assert set(place.marked().values()) == {1}
        ran = [(place.marks / name).read_text().strip() for name in names]
        for worker in (one, other):
            assert ran.count(str(worker.process.pid)) >= 3
            assert worker.is_well(), worker.text


def test_the_example_and_tokens(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Security 1 and 2: the page's programs do what it says; a bad token ends a worker, another's starves it."""
    tokens = write(
        place.folder / "tokens.toml",
        entry(TOKEN, "worker", ["consume", "publish"], ["count-*"]),
        entry(NARROW, "other", ["consume"], ["sub-*"]),
    )
    monkeypatch.setenv("TASKQUEUE_TOKENS_FILE", str(tokens))
    example = str(EXAMPLES / "tasks.py")
    counted = place.folder / "count.txt"
    with (
        place.server("taskqueue_memory"),
        Worker(place, "wrong", example, token="wrong") as wrong,
        Worker(place, "other", example, token=NARROW) as other,
    ):
        run = place.run(EXAMPLES / "submit.py", token=TOKEN).strip()
        assert wrong.process.wait(SECONDS) != 0
        assert "Unable to authenticate" in wrong.text
        assert "a valid token is required" in wrong.text
        wait_until(lambda: "Subscribing" in other.text, "it starts", seconds=SECONDS)
        assert not counted.exists()
        with Worker(place, "right", example, token=TOKEN) as right:
            wait_until(lambda: "Completed" in right.text, "it is run", seconds=SECONDS)
            assert counted.read_text() == "3"
            assert run in right.text
            assert right.is_well(), right.text
        assert other.process.poll() is None
        assert "Received" not in other.text
