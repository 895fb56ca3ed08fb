"""Measuring which confirmed tasks are lost when Redis is killed, loses power, or fails over to a replica."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from taskqueue_core.capabilities import Durability, QueueSettings
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.tasks import Published, Task
from taskqueue_redis import RedisBackend
from tests.binaries import c_compiler
from tests.chaos.proxy import FaultProxy
from tests.redis.engines import find_engine
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer, wait_until

_SHIMS = Path(__file__).parent / "shim"
KEY = "k"
LAG = 0.5
"""seconds for which a lagging replica is cut off before the master is killed"""
_HASTE = {"connect_timeout": 0.3, "answer_timeout": 0.3, "operation_timeout": 0.4}
_PUBLISHERS = 4
_BATCH = 10
_PACE = 0.02
"""seconds between two batches of a publisher"""
_PATIENCE = 20.0
_STRAGGLERS = 0.05
"""seconds to wait for answers that Redis sent before it was killed"""


class Cut(StrEnum):
    """How the Redis server ends."""

    KILL = "kill"
    """SIGKILL, followed by a restart"""
    POWER = "power"
    """SIGKILL and loss of all data not yet synced to disk, followed by a restart"""
    FAILOVER = "failover"
    """the master is killed and its replica promoted"""
    LAGGING_FAILOVER = "lagging failover"
    """the master is killed and a replica promoted that had been cut off for a while"""


class Case(msgspec.Struct, frozen=True):
    """One measurement: a durability class, and how the Redis server ends."""

    durability: Durability
    cut: Cut
    slow_disk: float = 0.0
    """additional seconds that each sync to disk takes"""
    sync: Literal["always", "everysec", "no"] | None = None
    """value of `appendfsync`; None means the weakest value sufficient for the durability class"""


class Loss(msgspec.Struct, frozen=True):
    """The result of a measurement."""

    confirmed: int
    ages: tuple[float, ...]
    """for each lost task, the seconds between its confirmation and the end of the server"""


def build_shim(folder: Path, name: str = "powercut") -> Path:
    """Compile a library that is preloaded into Redis, by default the one that records synced data; return its path."""
    library = folder / f"{name}.so"
    source = str(_SHIMS / f"{name}.c")
    command = [*c_compiler(), "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library


async def measure(folder: Path, case: Case, seconds: float, shim: Path | None = None) -> Loss:
    """Publish about 2,000 tasks per second for ``seconds``, end the server, and count the tasks lost after recovery.

    Power cuts and slow disks need the shim.
    """
    with ExitStack() as opened:
        master = _server(opened, folder / "redis", case)
        with _preloaded(shim, case) if shim else contextlib.nullcontext():
            master.start()
        backend = RedisBackend(settings=settings_for(master.url, **_HASTE))
        try:
            heir, between = master, None
            if case.cut in {Cut.FAILOVER, Cut.LAGGING_FAILOVER}:
                between = await FaultProxy(("127.0.0.1", master.port)).start()
                heir = _server(opened, folder / "replica", case).start()
                await asyncio.to_thread(_follow, heir, master, between)
            await backend.control.configure(KEY, QueueSettings(durability=case.durability))
            confirmed, cut = await _load(backend, master, between, case, seconds)
        finally:
            with contextlib.suppress(BackendUnavailable):
                await backend.aclose()
        if between:
            await between.aclose()
            heir.call("REPLICAOF", "NO", "ONE")
        else:
            if case.cut is Cut.POWER:
                _forget_what_was_not_synced(master)
            master.start()
        return Loss(len(confirmed), tuple(cut - at for at in await _gone(heir, confirmed)))


def _server(opened: ExitStack, folder: Path, case: Case) -> RedisServer:
    needed = "always" if case.durability is Durability.DISK else "everysec"
    config = {"appendfsync": case.sync or needed}
    aof = case.durability is not Durability.MEMORY
    server = RedisServer(find_engine(), folder, aof=aof, config=config)
    opened.callback(server.close)
    return server


@contextmanager
def _preloaded(library: Path, case: Case) -> Iterator[None]:
    """Preload the shim library into the processes that are started within the block."""
    os.environ["LD_PRELOAD"] = str(library)
    os.environ["POWERCUT_SLOW_MS"] = str(round(case.slow_disk * 1000))
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"], os.environ["POWERCUT_SLOW_MS"]


def _follow(replica: RedisServer, master: RedisServer, between: FaultProxy) -> None:
    replica.call("REPLICAOF", *between.address)
    wait_until(lambda: _in_step(replica, master), "the replica is in step")


def _in_step(replica: RedisServer, master: RedisServer) -> bool:
    told, own = replica.info("replication"), master.info("replication")
    if told["master_link_status"] != "up" or "state=online" not in own.get("slave0", ""):
        return False
    return int(told["slave_repl_offset"]) >= int(own["master_repl_offset"])


async def _load(
    backend: RedisBackend, master: RedisServer, between: FaultProxy | None, case: Case, seconds: float
) -> tuple[dict[str, float], float]:  # fmt: skip
    """Publish tasks, then kill Redis; return the time at which each task was confirmed, and the time of the kill."""
    confirmed: dict[str, float] = {}
    async with asyncio.TaskGroup() as group:
        begun = asyncio.Event()
        publishers = [
            group.create_task(_publish(backend, confirmed, begun)) for _ in range(_PUBLISHERS)
        ]
        # A new replica may take some time to connect.
        async with asyncio.timeout(_PATIENCE):
            await begun.wait()
        await asyncio.sleep(seconds)
        if between and case.cut is Cut.LAGGING_FAILOVER:
            between.block()
            await asyncio.sleep(LAG)
        cut = time.monotonic()
        await asyncio.to_thread(master.kill)
        await asyncio.sleep(_STRAGGLERS)
        for publisher in publishers:
            publisher.cancel()
    return confirmed, cut


async def _publish(
    backend: RedisBackend, confirmed: dict[str, float], begun: asyncio.Event
) -> None:
    while True:
        tasks = [Task(key=KEY) for _ in range(_BATCH)]
        with contextlib.suppress(PublishUnconfirmed, BackendUnavailable):
            answers = await backend.publisher.publish(*tasks)
            assert all(answer.status is Published.ACCEPTED for answer in answers)
            confirmed |= dict.fromkeys((task.id for task in tasks), time.monotonic())
            begun.set()
        await asyncio.sleep(_PACE)


def _forget_what_was_not_synced(server: RedisServer) -> None:
    for path in server.folder.rglob("*.aof"):
        noted = Path(f"{path}.synced")
        os.truncate(path, int(noted.read_text()) if noted.exists() else 0)


async def _gone(server: RedisServer, confirmed: dict[str, float]) -> list[float]:
    """Return the confirmation times of the tasks that a server does not have."""
    backend = RedisBackend(settings=settings_for(server.url))
    ids, gone = list(confirmed), []
    try:
        for start in range(0, len(ids), 500):
            some = ids[start : start + 500]
            known = await backend.control.statuses(KEY, *some)
            gone += [confirmed[n] for n, told in zip(some, known, strict=True) if told is None]
    finally:
        await backend.aclose()
    return gone
