"""What cannot start leaves nothing behind: no process, no open file, no held port."""

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
    """An engine whose program is not there."""
    return find_engine()._replace(binary=Path("/nowhere/valkey-server"))


@contextmanager
def nothing_left() -> Iterator[None]:
    """Children and open files, which ports are held by, are those of before."""

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
    """Fault M7: a server that cannot start, alone or in a group, has ended, and its port is free."""
    with nothing_left(), pytest.raises((AssertionError, OSError)):
        make(tmp_path).start()


async def test_taskqueue_serve(tmp_path: Path) -> None:
    """Fault M7: a command that ends instead of serving is waited for."""
    with nothing_left(), pytest.raises(AssertionError, match="no-such-backend"):
        async with serving(tmp_path, "--backend", "no-such-backend"):
            pass


async def test_server_processes(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault M7: where no process can be started, the way to it is closed."""
    assert redis_url
    await asyncio.to_thread(int)  # the event loop keeps its threads
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with nothing_left():
        with pytest.raises(ExceptionGroup) as caught:
            await Processes(settings(processes=1), "redis").run()
        assert caught.group_contains(FileNotFoundError)
        await asyncio.sleep(0)
