"""The compared kinds of Prefect servers: two replicas of each, with the same version of Prefect but different queues.

They are built from the helpers of the tests (``tests/prefect``), so that the tested code is measured. Each kind has its
own PostgreSQL and Redis.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import prefect_figures as figures

from tests.prefect.databases import Database
from tests.prefect.replicas import Replica, Site
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

_TICK = 0.2


class Ours(Site):
    """Servers with the queue of this project on Redis, and a short lease. All other settings have their defaults."""

    def __init__(self, python: str, folder: Path, database: str, redis: RedisServer) -> None:
        super().__init__(python, folder, database, redis)
        self.settings = {
            "PREFECT_API_DATABASE_CONNECTION_URL": database,
            "PREFECT_PLUGINS_ENABLED": "true",
            "TASKQUEUE_BACKEND": "redis",
            "TASKQUEUE_REDIS_URL": redis.url,
            "TASKQUEUE_REDIS_PREFIX": self.prefix,
            "TASKQUEUE_REDIS_LEASE": str(figures.LEASE),
            "TASKQUEUE_PREFECT_STRICT": "true",
        }


class Stock(Site):
    """Servers of Prefect without the plugin."""

    def __init__(self, python: str, folder: Path, database: str, redis: RedisServer) -> None:
        super().__init__(python, folder, database, redis)
        self.settings = {"PREFECT_API_DATABASE_CONNECTION_URL": database}


class Attempt(Site):
    """Servers from a folder with Prefect's source code, in which Prefect's queue is on Redis."""

    def __init__(
        self, python: str, folder: Path, database: str, redis: RedisServer, tree: Path
    ) -> None:
        """``tree`` contains the source code with generated modules, and in ``lib`` dependencies in other versions."""
        super().__init__(python, folder, database, redis)
        self._source = [tree / "src", tree / "src" / "integrations" / "prefect-redis", tree / "lib"]
        messages = {n: v for n, v in self.messages.items() if n != "PREFECT_REDIS_MESSAGING_URL"}
        self.settings = {
            "PREFECT_API_DATABASE_CONNECTION_URL": database,
            **messages,
            "PREFECT_REDIS_MESSAGING_HOST": "127.0.0.1",  # not all versions have a setting for the URL
            "PREFECT_REDIS_MESSAGING_PORT": str(redis.port),
            "PREFECT_TASK_SCHEDULING_BACKEND": "prefect_redis.task_queue",
            "PREFECT_TASK_SCHEDULING_INFLIGHT_VISIBILITY_TIMEOUT": str(figures.LEASE),
            "PREFECT_REDIS_TASK_QUEUE_VISIBILITY_TIMEOUT": str(figures.LEASE),
        }

    def environment(self, name: str, **more: str) -> dict[str, str]:
        """Return the environment of a process, in which the source folder precedes the installed Prefect."""
        found = super().environment(name, **more)
        found["PYTHONPATH"] = ":".join([*map(str, self._source), found["PYTHONPATH"]])
        return found


Kind = Callable[..., Site]
"""a function that creates a site from the interpreter, a folder, the URL of the database and Redis"""
BOTH: Mapping[str, Kind] = {figures.OURS: Ours, figures.STOCK: Stock}


@dataclass(frozen=True)
class Side:
    """Two running replicas of one kind of server."""

    name: str
    site: Site
    a: Replica
    b: Replica


def attempts(trees: Sequence[Path]) -> dict[str, Kind]:
    """Return functions that create the sites of earlier solutions, by name."""
    return {f"attempt {tree.name}": partial(Attempt, tree=tree) for tree in trees}


@contextmanager
def sides(python: str, kinds: Mapping[str, Kind]) -> Iterator[list[Side]]:
    """Start all kinds of servers at the same time, and stop them when the context ends."""
    with ExitStack() as stack:
        found = [_side(stack, python, name, kind) for name, kind in kinds.items()]
        for side in found:
            side.a.ready()
            side.b.ready()
        yield found


def _side(stack: ExitStack, python: str, name: str, kind: Kind) -> Side:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefect-bench-")))
    redis = stack.enter_context(RedisServer(find_engine(), folder / "redis", aof=True))
    database = stack.enter_context(Database(python))
    site = kind(python, folder, database.url, redis)
    one, other = Replica(site, "a"), Replica(site, "b")
    for replica in (one, other):
        stack.callback(replica.close)
        replica.start()
    return Side(name, site, one, other)


def versions(python: str) -> dict[str, str]:
    """Return the names and versions of the measured packages."""
    names = ["prefect", "prefect-redis", "pydocket"]
    program = f"import importlib.metadata as m; print(*map(m.version, {names}))"
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    engine = find_engine()
    found = dict(zip(names, said.stdout.split(), strict=True))
    return found | {engine.product: engine.release}


def completed(replica: Replica, runs: Sequence[str], patience: float = 15.0) -> int:
    """Return the number of completed runs when all are completed, or when it has not grown for ``patience`` seconds."""
    return still(lambda: _completed(replica, runs), len(runs), patience)


def _completed(replica: Replica, runs: Sequence[str]) -> int:
    asked: dict[str, Any] = {"id": {"any_": list(runs)}, "state": {"type": {"any_": ["COMPLETED"]}}}
    answer = replica.client.post("/task_runs/count", json={"task_runs": asked})
    assert answer.status_code == 200, answer.text
    return int(answer.json())


def still(count: Callable[[], int], wanted: float, patience: float) -> int:
    """Return the count when it reaches ``wanted``, or when it has not grown for ``patience`` seconds."""
    seen, since = count(), time.monotonic()
    while seen < wanted and time.monotonic() - since < patience:
        time.sleep(_TICK)
        now = count()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen
