"""Fixtures with backends that support slots: Redis always, memory in the long tests only."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

from taskqueue_core.backend import Backend
from taskqueue_memory import MemoryBackend
from tests.dispatch.killed import started
from tests.redis.backends import opened
from tests.redis.conftest import (
    make_server,
    redis_cluster,
    redis_prefix,
    redis_server,
    shared_servers,
)

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


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.long), "redis"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """Yield an empty backend with slots, and close it after the test.

    The conformance kit holds both backends to the same contract; the quick tests use Redis only.
    """
    if request.param == "memory":
        memory = MemoryBackend()
        yield memory
        await memory.aclose()
        return
    server = request.getfixturevalue("redis_server")
    prefix = request.getfixturevalue("redis_prefix")
    # The lease must be longer than a busy machine may stall a test. Tests that kill a process open a backend of their
    # own.
    async with opened(server.url, prefix, lease=10.0) as redis:
        yield redis
