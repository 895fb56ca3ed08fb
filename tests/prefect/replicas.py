"""Servers of Prefect with the plugin, as replicas of one database and one Redis, and their workers and clients."""

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
"""so soon a run is put in again that a worker has accepted who has gone: one that a test accepts it has to complete"""
SAID = "background tasks use the backend 'redis' for all replicas"
SECRET = "hush-hush"
"""the password of the store: no log may have it"""
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
"""what has nothing to do with background tasks is off: each server has two cores at most"""
_FAST = {
    "TASKQUEUE_REDIS_LEASE": str(LEASE),
    "TASKQUEUE_PREFECT_RECONCILE": "0.25",
    "TASKQUEUE_PREFECT_GRACE": str(GRACE),
}


def key() -> str:
    """Return a task's key that no other test has."""
    return f"add-{uuid4().hex[:8]}"


class Site:
    """What replicas have in common."""

    def __init__(self, python: str, folder: Path, database: str, redis: RedisServer) -> None:
        """Keep it. ``folder`` is for all that they write."""
        self.python = python
        self.folder = folder
        self.redis = redis
        self.prefix = "site"
        self.more: dict[str, str] = {}
        """for every program that uses Prefect"""
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
        """Settings for servers whose events go through Redis, so that the services may be in another process."""
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
        """For a program that uses Prefect; nothing of this process's own is in it."""
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
        """Run a program of this folder to its end; return what it says, as JSON."""
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
    """Where a process runs, and by which Python."""

    @property
    def python(self) -> str:
        """The interpreter."""

    @property
    def folder(self) -> Path:
        """Its working directory, and where its log is."""


class Process(Startable):
    """A program that goes on until it is ended, at the latest with the test process. Use it as a context."""

    def __init__(
        self, place: Place, name: str, words: list[str], environment: Mapping[str, str]
    ) -> None:
        """Start nothing yet."""
        self.name = name
        self._place = place
        self._words = words
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None
        """there is one as long as something of it may run"""

    @property
    def log(self) -> str:
        """What it has said."""
        return (self._place.folder / f"{self.name}.log").read_text(errors="replace")

    def _start(self) -> None:
        """Start it, if it is not running; not wait for anything."""
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
        """Wait until it is of use: at once, here."""
        return self

    def kill(self) -> None:
        """End it and its children, by SIGKILL."""
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
        """End it for good."""
        self.kill()

    def freeze(self) -> None:
        """Have it and its children stand still, until `thaw`."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Have it go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self, seconds: float = 20) -> int:
        """End it in order; return its exit code."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(seconds)
        finally:
            self.kill()  # and what it has left

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        assert self._process is not None
        return self._process.poll()


class Replica(Process):
    """A server of Prefect. Entered, it is ready."""

    command: tuple[str, ...] = ("-m", "prefect", "server", "start")

    def __init__(self, site: Site, name: str, *words: str, **settings: str) -> None:
        """``words`` go to the command."""
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
        """End it for good, and give its port back."""
        super().close()
        self.client.close()
        self._hold.release()

    def ready(self) -> Self:
        """Wait until it answers."""

        def answers() -> bool:
            assert self.code is None, self.log[-3000:]
            try:
                return self.client.get("/health").status_code == 200
            except httpx2.TransportError:
                return False

        wait_until(answers, f"{self.name} answers", seconds=2 * SECONDS, tick=0.1)
        return self

    def create(self, key: str, **details: Any) -> httpx2.Response:
        """Ask it to create a scheduled run, named like its key, as ``.delay()`` does."""
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
        """Create a run; return its id."""
        answer = self.create(key, **details)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def complete(self, *runs: str) -> None:
        """Say that runs were executed: what a worker does that has accepted them."""
        told = {"state": {"type": "COMPLETED"}, "force": True}
        for run in runs:
            answer = self.client.post(f"/task_runs/{run}/set_state", json=told)
            assert answer.status_code in {200, 201}, answer.text

    def state(self, run: str) -> str:
        """Return the name of a run's state."""
        return str(self.client.get(f"/task_runs/{run}").json()["state_name"])

    def all_reach(self, state: str, runs: list[str], seconds: float = SECONDS) -> None:
        """Wait until runs are in a state."""
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
    """A server's application in an ASGI server that is not Prefect's."""

    command = ("-m", "uvicorn", "--factory", "prefect.server.api.server:create_app")


@contextlib.contextmanager
def started(*servers: Process) -> Iterator[tuple[Process, ...]]:
    """Start some at once, and wait for all of them. However that ends, they are ended."""
    with ExitStack() as ending:
        for server in servers:
            ending.callback(server.close)
            server.start()
        for server in servers:
            server.ready()
        yield servers


def worker(site: Site, name: str, api: str, limit: int = 10) -> Process:
    """A worker of `background`, which takes so many runs at once."""
    words = [str(PROGRAMS / "background.py"), str(limit)]
    return Process(site, name, words, site.environment(name, PREFECT_API_URL=api))


def executed(site: Site) -> list[str]:
    """Return the names of the runs that were executed, one for each time."""
    path = site.folder / "executed"
    return path.read_text().split() if path.exists() else []
