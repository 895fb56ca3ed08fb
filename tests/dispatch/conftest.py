"""Backends with slots: a real Redis, and memory among the long tests."""

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
    """What starts dispatchers in processes of their own: see `killed.process`."""
    with started() as parent:
        yield parent


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.long), "redis"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """An empty backend with slots, closed in the end.

    The kit holds both kinds to one contract, so that what is built on it is tried on Redis every day.
    """
    if request.param == "memory":
        memory = MemoryBackend()
        yield memory
        await memory.aclose()
        return
    server = request.getfixturevalue("redis_server")
    prefix = request.getfixturevalue("redis_prefix")
    # A lease as long as a busy machine may stand still: whose process is killed opens its own.
    async with opened(server.url, prefix, lease=10.0) as redis:
        yield redis
