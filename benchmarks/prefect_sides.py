"""The compared sides: two replicas each, with the same Prefect and the same kind of database, but different queues.

The parts are those of the tests (``tests/prefect``), so the same code is measured and tested. Every side has its own
PostgreSQL and Redis.
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
    """With the plugin and Redis, and the lease that is compared; the rest is as it is by default."""

    def __init__(self, python: str, folder: Path, database: str, redis: RedisServer) -> None:
        """As `Site`."""
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
    """As Prefect is without the plugin."""

    def __init__(self, python: str, folder: Path, database: str, redis: RedisServer) -> None:
        """As `Site`."""
        super().__init__(python, folder, database, redis)
        self.settings = {"PREFECT_API_DATABASE_CONNECTION_URL": database}


class Attempt(Site):
    """A tree of Prefect's source in which its queue is on Redis, by either of the settings that there have been."""

    def __init__(
        self, python: str, folder: Path, database: str, redis: RedisServer, tree: Path
    ) -> None:
        """``tree``: with the modules that a build generates, and in ``lib`` what it needs in another version."""
        super().__init__(python, folder, database, redis)
        self._source = [tree / "src", tree / "src" / "integrations" / "prefect-redis", tree / "lib"]
        messages = {n: v for n, v in self.messages.items() if n != "PREFECT_REDIS_MESSAGING_URL"}
        self.settings = {
            "PREFECT_API_DATABASE_CONNECTION_URL": database,
            **messages,
            "PREFECT_REDIS_MESSAGING_HOST": "127.0.0.1",  # not all of them know a URL
            "PREFECT_REDIS_MESSAGING_PORT": str(redis.port),
            "PREFECT_TASK_SCHEDULING_BACKEND": "prefect_redis.task_queue",
            "PREFECT_TASK_SCHEDULING_INFLIGHT_VISIBILITY_TIMEOUT": str(figures.LEASE),
            "PREFECT_REDIS_TASK_QUEUE_VISIBILITY_TIMEOUT": str(figures.LEASE),
        }

    def environment(self, name: str, **more: str) -> dict[str, str]:
        """As `Site.environment`, with the tree before the installed Prefect."""
        found = super().environment(name, **more)
        found["PYTHONPATH"] = ":".join([*map(str, self._source), found["PYTHONPATH"]])
        return found


Kind = Callable[..., Site]
"""takes the interpreter, a folder, the URL of the database and Redis"""
BOTH: Mapping[str, Kind] = {figures.OURS: Ours, figures.STOCK: Stock}


@dataclass(frozen=True)
class Side:
    """One of those that are compared: two replicas, up."""

    name: str
    site: Site
    a: Replica
    b: Replica


def attempts(trees: Sequence[Path]) -> dict[str, Kind]:
    """Return what makes the sites of earlier attempts, by name."""
    return {f"attempt {tree.name}": partial(Attempt, tree=tree) for tree in trees}


@contextmanager
def sides(python: str, kinds: Mapping[str, Kind]) -> Iterator[list[Side]]:
    """Start all of these at once, by name."""
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
    """Return what is measured, by name, with its version."""
    names = ["prefect", "prefect-redis", "pydocket"]
    program = f"import importlib.metadata as m; print(*map(m.version, {names}))"
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    engine = find_engine()
    found = dict(zip(names, said.stdout.split(), strict=True))
    return found | {engine.product: engine.release}


def completed(replica: Replica, runs: Sequence[str], patience: float = 15.0) -> int:
    """Return how many of these are completed, once all are, or none more has been for a while."""
    return still(lambda: _completed(replica, runs), len(runs), patience)


def _completed(replica: Replica, runs: Sequence[str]) -> int:
    asked: dict[str, Any] = {"id": {"any_": list(runs)}, "state": {"type": {"any_": ["COMPLETED"]}}}
    answer = replica.client.post("/task_runs/count", json={"task_runs": asked})
    assert answer.status_code == 200, answer.text
    return int(answer.json())


def still(count: Callable[[], int], wanted: float, patience: float) -> int:
    """Return a count once it is what is wanted, or has not grown for so many seconds."""
    seen, since = count(), time.monotonic()
    while seen < wanted and time.monotonic() - since < patience:
        time.sleep(_TICK)
        now = count()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen
