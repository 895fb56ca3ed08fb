"""Prefect in an environment of its own, and a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from taskqueue_redis import RedisBackend
from tests.prefect.databases import Database
from tests.prefect.environment import python_with_prefect
from tests.prefect.replicas import Replica, Site
from tests.redis.backends import opened
from tests.redis.conftest import (
    redis_prefix,
    redis_server,
    redis_url,
    shared_servers,
)
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

__all__ = ["redis_prefix", "redis_server", "redis_url", "shared_servers"]


@pytest.fixture(scope="session")
def prefect_python() -> str:
    """An interpreter that has Prefect."""
    return python_with_prefect()


@pytest.fixture(scope="module")
def site(prefect_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A database and a Redis for replicas of Prefect."""
    folder = tmp_path_factory.mktemp("site")
    redis = RedisServer(find_engine(), tmp_path_factory.mktemp("redis-site"), aof=True)
    with redis, Database(prefect_python) as database:
        yield Site(prefect_python, folder, database.url, redis)


@pytest.fixture(scope="module")
def pair(site: Site) -> Iterator[tuple[Replica, Replica]]:
    """Two replicas."""
    with Replica(site, "a").start() as one, Replica(site, "b").start() as other:
        yield one, other


@pytest.fixture
async def backend(site: Site) -> AsyncIterator[RedisBackend]:
    """The replicas' backend, as an operator has it."""
    async with opened(site.redis.url, site.prefix) as found:
        yield found
