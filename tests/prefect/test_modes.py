"""Every way to start a server of Prefect: each has the queue that all others have."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from uuid import uuid4

import httpx2
import pytest

from taskqueue_redis import RedisBackend
from tests.prefect.replicas import SECONDS, Process, Replica, Site, executed, worker
from tests.prefect.support import Taker
from tests.redis.servers import wait_until

Pair = tuple[Replica, Replica]
SAID = "background tasks go through the backend 'redis' for all replicas"


class Application(Replica):
    """A server's application in an ASGI server that is not Prefect's."""

    command = ("-m", "uvicorn", "--factory", "prefect.server.api.server:create_app")


def key() -> str:
    """A task's key that no other test has."""
    return f"add-{uuid4().hex[:8]}"


async def shared(one: Replica, other: Replica) -> None:
    """Check that what either takes in is sent to a worker of the other."""
    for taken_in, asked in ((one, other), (other, one)):
        name = key()
        run = taken_in.created(name)
        async with Taker(asked.socket, name) as taker:
            assert (await taker.receive())["id"] == run
            await taker.ack()


@pytest.fixture(scope="module")
def bare(site: Site) -> Iterator[Pair]:
    """Two servers without services, and a process that has nothing else."""
    with ExitStack() as ending:
        pair = [Replica(site, name, "--no-services", **site.messages) for name in ("a", "b")]
        services = Process(
            site,
            "services",
            ["-m", "prefect", "server", "services", "start"],
            site.environment("services", **site.settings | site.messages),
        )
        for process in (*pair, services):
            ending.push(process.start())
        yield pair[0].ready(), pair[1].ready()


def test_services_in_a_process_of_their_own(bare: Pair, site: Site) -> None:
    """Row E1: ``--no-services`` twice, and ``services start``: what one takes in a worker of the other completes."""
    a, b = bare
    with worker(site, "w", b.api):
        runs = site.run("delay.py", "10", "apart-", api=a.api)
        a.all_reach("Completed", runs)
    assert sorted(executed(site)) == [f"apart-{n}" for n in range(10)]
    assert all(SAID in replica.log for replica in bare)


async def test_any_asgi_server(bare: Pair, site: Site) -> None:
    """Row E1: the application in a plain uvicorn, as containers have it, is one of the replicas."""
    with Application(site, "plain") as plain:
        assert SAID in plain.log
        await shared(plain, bare[0])


class Background(Replica):
    """A server that its command leaves running."""

    def __init__(self, site: Site, name: str) -> None:
        """Have Prefect found in a folder of its own: it puts what lies beside it before ``PYTHONPATH``."""
        self.site = site
        alone = site.folder / "alone"
        alone.mkdir()
        (there,) = Path(site.python).parents[1].glob("lib/python*/site-packages/prefect")
        (alone / "prefect").symlink_to(there)
        path = os.pathsep.join([str(alone), site.environment(name)["PYTHONPATH"]])
        super().__init__(site, name, "--background", PYTHONPATH=path)

    def ready(self) -> Self:
        """Wait until the command has ended, and the server answers."""
        wait_until(lambda: self.code is not None, "the command ends", seconds=SECONDS)
        assert self.code == 0, self.log

        def answers() -> bool:
            with contextlib.suppress(httpx2.TransportError):
                return self.client.get("/health").status_code == 200
            return False

        wait_until(answers, "the server answers", seconds=SECONDS, tick=0.1)
        return self

    def end(self) -> None:
        """End it as it was started."""
        ended = subprocess.run(
            [self.site.python, "-m", "prefect", "server", "stop"],
            env=self.site.environment(self.name),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def kill(self) -> None:
        """End what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        super().kill()


async def test_in_the_background(bare: Pair, site: Site, backend: RedisBackend) -> None:
    """Row E1: ``--background`` is one of the replicas, and ``server stop`` has it hand back what it had sent."""
    name = key()
    with Background(site, "background") as server:
        await shared(server, bare[0])
        run = bare[0].created(name)
        async with Taker(server.socket, name) as first:
            assert (await first.receive())["id"] == run
            server.end()
            assert (await first.closed(SECONDS))[0] == 1012
            async with Taker(bare[1].socket, name) as second:
                assert (await second.receive())["id"] == run
                (status,) = await backend.control.statuses(name, run)
                assert status is not None
                assert (status.attempt, status.losses) == (1, 0)
                await second.ack()
