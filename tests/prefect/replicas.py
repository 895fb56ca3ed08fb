"""Prefect servers with the plugin, as replicas that share a database and a Redis, and their workers and clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self
from uuid import uuid4

import httpx2

from taskqueue_redis.embedded.watchdog import Watchdog
from tests.binaries.folders import ROOT
from tests.prefect.environment import PROGRAMS
from tests.redis.reserved import reserve
from tests.redis.servers import RedisServer, Startable, wait_until

SECONDS = 60.0
LEASE = 2.0
GRACE = 0.5
"""seconds after which a run accepted by a vanished worker is scheduled again; tests must complete accepted runs"""
SAID = "background tasks use the backend 'redis' for all replicas"
SECRET = "hush-hush"
"""the password of the store, which must not appear in a log"""
_OFF = (
    "SCHEDULER",
    "LATE_RUNS",
    "CANCELLATION_CLEANUP",
    "CLEANUP_RECONCILER",
    "EVENT_PERSISTER",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
    "FOREMAN",
    "TRIGGERS",
)
_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_UI_ENABLED": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_API_DATABASE_MIGRATE_ON_START": "false",
    **{f"PREFECT_API_SERVICES_{name}_ENABLED": "false" for name in _OFF},
}
"""switches off what background tasks do not need, because each server has at most two cores"""
_FAST = {
    "TASKQUEUE_REDIS_LEASE": str(LEASE),
    "TASKQUEUE_PREFECT_RECONCILE": "0.25",
    "TASKQUEUE_PREFECT_GRACE": str(GRACE),
}


def key() -> str:
    """Return a task key that no other test uses."""
    return f"add-{uuid4().hex[:8]}"


class Site:
    """The database, store, folder and settings that replicas share."""

    def __init__(self, python: str, folder: Path, database: str, redis: RedisServer) -> None:
        """Store the shared resources; ``folder`` is for all files of the replicas."""
        self.python = python
        self.folder = folder
        self.redis = redis
        self.prefix = "site"
        self.more: dict[str, str] = {}
        """additional environment variables of every program that uses Prefect"""
        self.settings = {
            "PREFECT_API_DATABASE_CONNECTION_URL": database,
            "PREFECT_PLUGINS_ENABLED": "true",
            "TASKQUEUE_BACKEND": "redis",
            "TASKQUEUE_REDIS_URL": redis.url,
            "TASKQUEUE_REDIS_PREFIX": self.prefix,
            **_FAST,
        }

    @property
    def messages(self) -> dict[str, str]:
        """Settings for sending events through Redis, so that Prefect's services may run in another process."""
        return {
            "PREFECT_MESSAGING_BROKER": "prefect_redis.messaging",
            "PREFECT_MESSAGING_CACHE": "prefect_redis.messaging",
            "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "prefect_redis.ordering",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect_redis.lease_storage",
            "PREFECT_SERVER_WORKER_CHANNEL_CLEANUP_QUEUE_STORAGE": "prefect_redis.cleanup_queue",
            "PREFECT_REDIS_MESSAGING_URL": self.redis.url,
            "PREFECT_REDIS_MESSAGING_PUBLISHER_BATCH_SIZE": "1",
            "PREFECT_SERVER_DOCKET_URL": self.redis.url,
            "PREFECT_SERVER_DOCKET_NAME": "docket",
        }

    def environment(self, name: str, **more: str) -> dict[str, str]:
        """Return the environment for a program that uses Prefect, without variables of this process except PATH."""
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(PROGRAMS)]),
            "PYTHONUNBUFFERED": "1",
            "PREFECT_HOME": str(self.folder / name),
            "PREFECT_LOCAL_STORAGE_PATH": str(self.folder / "results"),
            "PREFECT_LOGGING_TO_API_ENABLED": "false",
            "MARKS": str(self.folder),
            **_QUIET,
            **self.more,
            **more,
        }

    def run(self, program: str, *words: str, api: str) -> Any:
        """Run a program of the folder ``programs`` to its end, and return its output as parsed JSON."""
        done = subprocess.run(
            [self.python, str(PROGRAMS / program), *words],
            env=self.environment("client", PREFECT_API_URL=api),
            capture_output=True,
            text=True,
            timeout=2 * SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)


class Place(Protocol):
    """The folder and the Python interpreter of a process."""

    @property
    def python(self) -> str:
        """The path of the Python interpreter."""

    @property
    def folder(self) -> Path:
        """The process's working directory, which also contains its log."""


class Process(Startable):
    """A program that runs until it is stopped, or until the test process ends. Used as a context manager."""

    def __init__(
        self, place: Place, name: str, words: list[str], environment: Mapping[str, str]
    ) -> None:
        """Create the process without starting it."""
        self.name = name
        self._place = place
        self._words = words
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        """set while the process or one of its children may be running"""

    @property
    def log(self) -> str:
        """The complete log of the process."""
        return (self._place.folder / f"{self.name}.log").read_text(errors="replace")

    def _start(self) -> None:
        """Start the process unless it is running, without waiting for it."""
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        with (self._place.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._place.python, *self._words],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._place.folder,
                start_new_session=True,
            )
        self._watchdog = Watchdog("TERM", group=True)
        self._watchdog.watch(self.pid)

    def ready(self) -> Self:
        """Wait until the process is ready, which this class does not check."""
        return self

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL."""
        if self._watchdog is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._watchdog.close()
        self._watchdog = None

    def __enter__(self) -> Self:
        try:
            return self.start().ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the process and release what it used."""
        self.kill()

    def freeze(self) -> None:
        """Suspend the process and its children until `thaw`."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the process and its children."""
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self, seconds: float = 20) -> int:
        """Stop the process with SIGTERM, and return its exit code."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(seconds)
        finally:
            self.kill()  # kills children that are still running

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or ``None`` while the process is running."""
        assert self._process is not None
        return self._process.poll()


class Replica(Process):
    """A Prefect server. As a context manager it waits until the server is ready."""

    command: tuple[str, ...] = ("-m", "prefect", "server", "start")

    def __init__(self, site: Site, name: str, *words: str, **settings: str) -> None:
        """Create the server; ``words`` are additional arguments of the command."""
        self._hold = reserve()
        self.port = self._hold.port
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.socket = f"ws://127.0.0.1:{self.port}/api/task_runs/subscriptions/scheduled"
        start = [*self.command, "--host", "127.0.0.1", "--port", str(self.port)]
        super().__init__(
            site, name, [*start, *words], site.environment(name, **site.settings | settings)
        )
        self.client = httpx2.Client(base_url=self.api, trust_env=False, timeout=15)

    def close(self) -> None:
        """Kill the server, and release its port."""
        super().close()
        self.client.close()
        self._hold.release()

    def ready(self) -> Self:
        """Wait until the server responds."""

        def answers() -> bool:
            assert self.code is None, self.log[-3000:]
            try:
                return self.client.get("/health").status_code == 200
            except httpx2.TransportError:
                return False

        wait_until(answers, f"{self.name} answers", seconds=2 * SECONDS, tick=0.1)
        return self

    def create(self, key: str, **details: Any) -> httpx2.Response:
        """Request a scheduled run with the key as its name, as ``.delay()`` does, and return the response."""
        told = {"deferred": True, "task_parameters_id": str(uuid4()), **details}
        return self.client.post(
            "/task_runs/",
            json={
                "task_key": key,
                "dynamic_key": uuid4().hex,
                "name": key,
                "state": {"type": "SCHEDULED", "state_details": told},
            },
        )

    def created(self, key: str, **details: Any) -> str:
        """Create a scheduled run, and return its id."""
        answer = self.create(key, **details)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def complete(self, *runs: str) -> None:
        """Set runs to completed, as a worker does that has executed them."""
        told = {"state": {"type": "COMPLETED"}, "force": True}
        for run in runs:
            answer = self.client.post(f"/task_runs/{run}/set_state", json=told)
            assert answer.status_code in {200, 201}, answer.text

    def state(self, run: str) -> str:
        """Return the name of a run's state."""
        return str(self.client.get(f"/task_runs/{run}").json()["state_name"])

    def all_reach(self, state: str, runs: list[str], seconds: float = SECONDS) -> None:
        """Wait until all runs are in the given state."""
        left = set(runs)

        def there() -> bool:
            answer = self.client.post(
                "/task_runs/filter",
                json={"task_runs": {"id": {"any_": sorted(left)}}, "limit": 200},
            )
            left.difference_update(one["id"] for one in answer.json() if one["state_name"] == state)
            return not left

        try:
            wait_until(there, f"runs are {state}", seconds=seconds, tick=0.1)
        except TimeoutError:
            seen = {run: self.state(run) for run in sorted(left)[:5]}
            raise AssertionError(f"{len(left)} of {len(runs)} are not {state}: {seen}") from None


class Application(Replica):
    """Prefect's server application, run by uvicorn instead of Prefect's command."""

    command = ("-m", "uvicorn", "--factory", "prefect.server.api.server:create_app")


@contextlib.contextmanager
def started(*servers: Process) -> Iterator[tuple[Process, ...]]:
    """Start several processes at once and wait until all are ready; stop them at the end in any case."""
    with ExitStack() as ending:
        for server in servers:
            ending.callback(server.close)
            server.start()
        for server in servers:
            server.ready()
        yield servers


def worker(site: Site, name: str, api: str, limit: int = 10) -> Process:
    """Return a worker of `background` that executes up to ``limit`` runs at once."""
    words = [str(PROGRAMS / "background.py"), str(limit)]
    return Process(site, name, words, site.environment(name, PREFECT_API_URL=api))


def executed(site: Site) -> list[str]:
    """Return the names of the executed runs, once per execution."""
    path = site.folder / "executed"
    return path.read_text().split() if path.exists() else []
