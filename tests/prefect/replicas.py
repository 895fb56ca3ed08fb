"""Servers of Prefect with the plugin, as replicas of one database and one Redis, and their workers and clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import httpx2

from taskqueue_redis.watchdog import Watchdog
from tests.ports import free_port
from tests.prefect.environment import PROGRAMS, ROOT
from tests.redis.servers import RedisServer, wait_until

__all__ = ["Process", "Replica", "Site", "executed", "worker"]

SECONDS = 60.0
_OFF = (
    "SCHEDULER",
    "LATE_RUNS",
    "CANCELLATION_CLEANUP",
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
    "TASKQUEUE_REDIS_LEASE": "2",
    "TASKQUEUE_PREFECT_RECONCILE": "0.5",
    "TASKQUEUE_PREFECT_GRACE": "3",
}


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


class Process:
    """A program that goes on until it is ended, at the latest with the test process. Use it as a context."""

    def __init__(
        self, site: Site, name: str, words: list[str], environment: Mapping[str, str]
    ) -> None:
        """Start nothing yet."""
        self.name = name
        self._site = site
        self._words = words
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @property
    def log(self) -> str:
        """What it has said."""
        return (self._site.folder / f"{self.name}.log").read_text(errors="replace")

    def start(self) -> Self:
        """Start it, if it is not running; not wait for anything."""
        if self._process is not None and self._process.poll() is None:
            return self
        with (self._site.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._site.python, *self._words],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._site.folder,
                start_new_session=True,
            )
        if self._watchdog is None:
            self._watchdog = Watchdog("TERM")
        self._watchdog.watch(self.pid)
        return self

    def kill(self) -> None:
        """End it and its children, by SIGKILL."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._unwatched()

    def _unwatched(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

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
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._unwatched()
        return code

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

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.kill()


class Replica(Process):
    """A server of Prefect. Entered, it is ready."""

    command: tuple[str, ...] = ("-m", "prefect", "server", "start")

    def __init__(self, site: Site, name: str, *words: str, **settings: str) -> None:
        """``words`` go to the command."""
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.socket = f"ws://127.0.0.1:{self.port}/api/task_runs/subscriptions/scheduled"
        start = [*self.command, "--host", "127.0.0.1", "--port", str(self.port)]
        super().__init__(
            site, name, [*start, *words], site.environment(name, **site.settings | settings)
        )
        self.client = httpx2.Client(base_url=self.api, trust_env=False, timeout=15)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            return self.ready()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.client.close()
        super().__exit__()

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


def worker(site: Site, name: str, api: str, limit: int = 10) -> Process:
    """A worker of `background`, which takes so many runs at once."""
    words = [str(PROGRAMS / "background.py"), str(limit)]
    return Process(site, name, words, site.environment(name, PREFECT_API_URL=api))


def executed(site: Site) -> list[str]:
    """Return the names of the runs that were executed, one for each time."""
    path = site.folder / "executed"
    return path.read_text().split() if path.exists() else []
