"""Fixtures with a Redis backend, and with processes that are killed."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

from taskqueue_core.backend import Backend
from tests.dispatch.killed import started
from tests.redis.backends import opened
from tests.redis.conftest import (
    make_server,
    redis_cluster,
    redis_prefix,
    redis_server,
    shared_servers,
)
from tests.redis.servers import RedisServer

__all__ = [
    "make_server",
    "redis_cluster",
    "redis_prefix",
    "redis_server",
    "shared_servers",
]


@pytest.fixture(scope="session")
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that forks the dispatchers of the tests; see `killed.process`."""
    with started() as parent:
        yield parent


@pytest.fixture
async def backend(redis_server: RedisServer, redis_prefix: str) -> AsyncIterator[Backend]:
    """Yield an empty backend with slots, and close it after the test.

    It is Redis only, because the conformance kit holds all backends to the same contract.
    """
    # The lease must be longer than a busy machine may stall a test. Tests that kill a process open a backend of their
    # own.
    async with opened(redis_server.url, redis_prefix, lease=10.0) as redis:
        yield redis
