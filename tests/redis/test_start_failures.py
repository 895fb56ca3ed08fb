"""Test servers and server processes that fail to start leave no process, open file or reserved port."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taskqueue_server.process.supervisor import Processes
from tests.redis.clusters import Cluster, Sentinels
from tests.redis.engines import Engine, find_engine
from tests.redis.servers import RedisServer, Startable
from tests.redis.serving import serving
from tests.server.support import settings

WRONG = {"no-such-setting": "1"}


def absent() -> Engine:
    """Return an engine whose program does not exist."""
    return find_engine()._replace(binary=Path("/nowhere/valkey-server"))


@contextmanager
def nothing_left() -> Iterator[None]:
    """Assert that the block leaves no child process and no open file, by which ports are reserved."""

    def held() -> tuple[list[str], set[str]]:
        gc.collect()
        tasks = Path("/proc/self/task").glob("*/children")
        children = [pid for path in tasks for pid in path.read_text().split()]
        return sorted(children), {path.name for path in Path("/proc/self/fd").iterdir()}

    before = held()
    yield
    assert held() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: RedisServer(find_engine(), folder, config=WRONG),
        lambda folder: RedisServer(absent(), folder),
        lambda folder: Cluster(find_engine(), folder, config=WRONG),
        lambda folder: Cluster(absent(), folder),
        lambda folder: Sentinels(find_engine(), folder, config=WRONG),
    ],
    ids=["server", "no program", "cluster", "cluster without a program", "sentinels"],
)
def test_servers(tmp_path: Path, make: Callable[[Path], Startable]) -> None:
    """Fault M7: a server or group that cannot start is stopped, and its port is released."""
    with nothing_left(), pytest.raises((AssertionError, OSError)):
        make(tmp_path).start()


async def test_taskqueue_serve(tmp_path: Path) -> None:
    """Fault M7: if the command ends instead of serving, its process is awaited."""
    with nothing_left(), pytest.raises(AssertionError, match="no-such-backend"):
        async with serving(tmp_path, "--backend", "no-such-backend"):
            pass


async def test_server_processes(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault M7: if no server process can be started, the main process closes everything it opened."""
    assert redis_url
    await asyncio.to_thread(int)  # starts a thread that the event loop keeps
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with nothing_left():
        with pytest.raises(ExceptionGroup) as caught:
            await Processes(settings(processes=1), "redis").run()
        assert caught.group_contains(FileNotFoundError)
        await asyncio.sleep(0)
