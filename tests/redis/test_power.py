"""A power cut: whatever Redis had not synced is gone, as a shim under its system calls tells."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taskqueue_core.capabilities import Durability, QueueSettings
from taskqueue_core.tasks import Published, Task
from taskqueue_redis import RedisBackend
from tests.redis.conftest import MakeServer
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer

SHIM = Path(__file__).parent / "shim" / "powercut.c"
KEY = "k"


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim, built."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "a C compiler is needed: on Debian and Ubuntu `apt-get install gcc` brings one"
    library = tmp_path_factory.mktemp("shim") / "powercut.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


@contextmanager
def preloaded(library: Path) -> Iterator[None]:
    """Start processes with the shim."""
    os.environ["LD_PRELOAD"] = str(library)
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"]


def cut_power(server: RedisServer) -> int:
    """Kill Redis and take from its files what was not synced; return how many bytes that were."""
    server.kill()
    gone = 0
    for path in server.folder.rglob("*.aof"):
        noted = Path(f"{path}.synced")
        synced = int(noted.read_text()) if noted.exists() else 0
        gone += path.stat().st_size - synced
        os.truncate(path, synced)
    return gone


async def lost_in_a_power_cut(
    server: RedisServer, library: Path, durability: Durability, seconds: float
) -> tuple[int, list[float]]:
    """Publish for so long, cut the power, and return how many were confirmed and the ages of those that are gone."""
    with preloaded(library):
        server.start()
    backend = RedisBackend(settings=settings_for(server.url))
    confirmed: dict[str, float] = {}
    try:
        await backend.control.configure(KEY, QueueSettings(durability=durability))
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            tasks = [Task(key=KEY) for _ in range(20)]
            answers = await backend.publisher.publish(*tasks)
            assert all(answer.status is Published.ACCEPTED for answer in answers)
            confirmed |= dict.fromkeys((task.id for task in tasks), time.monotonic())
            await asyncio.sleep(0)
        cut = time.monotonic()
        cut_power(server)
        server.start()
        ids = list(confirmed)
        gone: list[float] = []
        for start in range(0, len(ids), 500):
            some = ids[start : start + 500]
            known = await backend.control.statuses(KEY, *some)
            gone += [
                cut - confirmed[name]
                for name, told in zip(some, known, strict=True)
                if told is None
            ]
    finally:
        await backend.aclose()
    return len(confirmed), gone


async def test_synced_every_second(make_server: MakeServer, shim: Path) -> None:
    """Fault B3: the class ``process`` loses what was confirmed in the last two seconds before a power cut at most."""
    server = make_server(aof=True, config={"appendfsync": "everysec"})
    confirmed, gone = await lost_in_a_power_cut(server, shim, Durability.PROCESS, 3.0)
    assert gone, "the shim cut nothing off"
    assert max(gone) <= 2.0
    assert len(gone) < confirmed


async def test_synced_always(make_server: MakeServer, shim: Path) -> None:
    """Fault B4: the class ``disk`` loses nothing that was confirmed."""
    server = make_server(aof=True, config={"appendfsync": "always"})
    confirmed, gone = await lost_in_a_power_cut(server, shim, Durability.DISK, 1.5)
    assert confirmed > 100
    assert not gone
