"""Migrations between two Redis servers; the operator is killed in each command, and a worker in each phase."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.migration import MigrationMode
from taskqueue_redis import RedisBackend
from tests.flow.migrating import migration
from tests.redis.engines import find_engine
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer

pytestmark = pytest.mark.long

LEASE = 1.0
HOUSEKEEPING = 0.2
STARTED = 0.9
"""maximum seconds after which a command is killed: by then it has begun, and often ended"""


class Home:
    """A store in Redis that simulated processes open and leave."""

    def __init__(self, url: str) -> None:
        self.url = url

    def enter(self) -> Backend:
        """Open a backend on the store."""
        more = {"lease": LEASE, "housekeeping": HOUSEKEEPING, "operation_timeout": 0.8}
        return RedisBackend(settings=settings_for(self.url, answer_timeout=0.5, **more))

    async def kill(self, backend: Backend) -> None:
        """Close the backend's connections without returning deliveries, as if its process had been killed."""
        home = backend._context  # type: ignore[attr-defined]
        await home.heartbeat.aclose()
        await home.wakeups.aclose()
        await home.client.aclose()

    async def keep(self) -> None:
        """Run maintenance periodically, as servers do."""
        backend = self.enter()
        try:
            while True:
                await asyncio.sleep(HOUSEKEEPING)
                await backend.control.maintain()  # type: ignore[attr-defined]
        finally:
            await backend.aclose()


class Operator:
    """Runs each migration command twice: in a process that is killed, and in one that may finish."""

    def __init__(self, old: Home, new: Home, mode: MigrationMode, chance: random.Random) -> None:
        self.chance = chance
        self.environment = os.environ | {
            "TASKQUEUE_BACKEND": "redis",
            "TASKQUEUE_REDIS_URL": new.url,
            "TASKQUEUE_MIGRATE_FROM": "redis",
            "TASKQUEUE_MIGRATE_MODE": mode.value,
            "TASKQUEUE_OLD_REDIS_URL": old.url,
        }

    async def __call__(self, name: str) -> None:
        """Run the command with this name."""
        process = await self._start(name)
        await asyncio.sleep(self.chance.uniform(0.2, STARTED))
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.communicate()
        process = await self._start(name)
        _, told = await process.communicate()
        assert process.returncode == 0, told.decode()

    async def _start(self, name: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "taskqueue_cli", "migrate", name,
            env=self.environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.chaos] * (seed >= 2)) for seed in range(50)]
)
async def test_a_migration_with_kills(folder: Path, seed: int) -> None:
    """A20, faults J1, J2, J3, J5, J7: whichever process is killed, each task is done in exactly one of the stores."""
    with ExitStack() as running:
        homes = []
        for side in ("old", "new"):
            (folder / side).mkdir(parents=True)
            server = RedisServer(find_engine(), folder / side)
            running.callback(server.close)
            server.start()
            homes.append(Home(server.url))
        old, new = homes
        mode = tuple(MigrationMode)[seed % 2]
        operator = Operator(old, new, mode, random.Random(seed))
        async with asyncio.TaskGroup() as group:
            keepers = [group.create_task(home.keep()) for home in homes]
            story = await migration(seed, old, new, mode=mode, tasks=12, command=operator)
            for keeper in keepers:
                keeper.cancel()
        story.check()
