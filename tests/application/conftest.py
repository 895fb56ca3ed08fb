"""Stores on which declared tasks run: memory, Redis, and a server in between; a registry for tests of `TestQueue`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from taskqueue_core import Tasks
from taskqueue_core.assembly import open_backend
from taskqueue_memory import MemoryBackend
from taskqueue_remote import RemoteBackend
from taskqueue_worker import LocalWorker, Worker
from taskqueue_worker.pytest_plugin import taskqueue
from tests.application.running import OpenWorld, World
from tests.application.shop import Shop
from tests.redis.clusters import Cluster
from tests.redis.conftest import (
    redis_cluster,
    redis_prefix,
    redis_server,
    redis_url,
    shared_servers,
)
from tests.server.access import ADMIN, everybody
from tests.server.support import running

__all__ = [
    "redis_cluster",
    "redis_prefix",
    "redis_server",
    "redis_url",
    "shared_servers",
    "taskqueue",
]


@pytest.fixture
def shop() -> Shop:
    """Return a registry without connections."""
    return Shop()


@pytest.fixture
def tasks(shop: Shop) -> Tasks:
    """Return the registry for the fixture ``taskqueue``."""
    return shop.tasks


@pytest.fixture
def cluster_url(redis_cluster: Cluster, redis_prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a cluster, which environment variables have, too."""
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_cluster.url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    return redis_cluster.url


@pytest.fixture(params=["memory", "redis", "server"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> OpenWorld:
    """Return a function that opens a store with its kind of worker. The server requires a token.

    A test that asks for it by parameters also has ``cluster``.
    """
    if request.param in ("redis", "cluster"):
        request.getfixturevalue("redis_url" if request.param == "redis" else "cluster_url")

    @asynccontextmanager
    async def opened() -> AsyncIterator[World]:
        if request.param == "server":
            tokens = everybody(tmp_path / "tokens.toml")
            async with running(MemoryBackend(), tokens_file=tokens) as it:
                url = it.server.url
                remote = RemoteBackend(url, ADMIN)
                yield World(remote, lambda *t, **o: Worker(*t, url=url, token=ADMIN, **o))
                await remote.aclose()
            return
        backend = open_backend("redis" if request.param == "cluster" else request.param)
        try:
            yield World(backend, lambda *t, **o: LocalWorker(*t, backend=backend, **o))
        finally:
            await backend.aclose()

    return opened
