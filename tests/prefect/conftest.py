"""Fixtures with Prefect in a Python environment of its own, and a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from taskqueue_redis import RedisBackend
from tests.prefect.databases import Database
from tests.prefect.environment import python_with_prefect
from tests.prefect.replicas import SECRET, Application, Replica, Site, started
from tests.redis.backends import opened
from tests.redis.conftest import (
    redis_prefix,
    redis_server,
    redis_url,
    shared_servers,
)
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

Pair = tuple[Replica, Replica]
STRICT = {"TASKQUEUE_PREFECT_STRICT": "true"}
__all__ = ["redis_prefix", "redis_server", "redis_url", "shared_servers"]


@pytest.fixture(scope="session")
def prefect_python() -> str:
    """Return the path of a Python interpreter that has Prefect installed."""
    return python_with_prefect()


@pytest.fixture(scope="session")
def site(prefect_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield the database, the store and the folder that all replicas of this test process share."""
    folder = tmp_path_factory.mktemp("site")
    redis = RedisServer(find_engine(), tmp_path_factory.mktemp("redis-site"), aof=True)
    redis.login = "default", SECRET
    with redis, Database(prefect_python) as database:
        yield Site(prefect_python, folder, database.url, redis)


@pytest.fixture(scope="session")
def replicas(site: Site) -> Iterator[Pair]:
    """Yield two Prefect servers for all tests.

    Prefect's command starts one, and uvicorn the other, as in containers.
    """
    one, other = Replica(site, "a", **STRICT), Application(site, "b", **STRICT)
    with started(one, other):
        yield one, other


@pytest.fixture
def pair(replicas: Pair) -> Pair:
    """Return the two replicas, both running.

    A test may kill or freeze them, because they are restarted for the next one.
    """
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.ready()
    return replicas


@pytest.fixture
async def backend(site: Site) -> AsyncIterator[RedisBackend]:
    """Yield a backend for the replicas' store, as an operator would open it."""
    async with opened(site.redis.url, site.prefix) as found:
        yield found
