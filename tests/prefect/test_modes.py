"""Tests of other ways to start a Prefect server: they all share one queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx2
import pytest
from websockets.exceptions import ConnectionClosed

from taskqueue_redis import RedisBackend
from tests.prefect.replicas import (
    SAID,
    SECONDS,
    Process,
    Replica,
    Site,
    executed,
    key,
    started,
    worker,
)
from tests.prefect.support import Taker
from tests.redis.servers import wait_until
from tests.server.support import eventually

pytestmark = pytest.mark.long
Pair = tuple[Replica, Replica]
BACKLOG = 12


async def shared(one: Replica, other: Replica) -> None:
    """Check that a run created at either server is sent to a worker of the other."""
    for taken_in, asked in ((one, other), (other, one)):
        name = key()
        run = taken_in.created(name)
        async with Taker(asked.socket, name) as taker:
            assert (await taker.receive())["id"] == run
            await taker.ack()


@pytest.mark.parametrize("module", [False, True], ids=["prefect", "python -m prefect"])
async def test_several_processes_of_one_server(site: Site, *, module: bool) -> None:
    """Row E1: the server processes of ``--workers`` share one queue.

    Prefect's own would each have a queue. Started by ``python -m prefect``, Prefect itself runs no plugins in these
    processes.
    """
    name = key()
    words = ("--no-services", "--workers", "2")
    start = ("-m", "prefect") if module else (str(Path(site.python).with_name("prefect")),)

    class Many(Replica):
        command = (*start, "server", "start")

    with Many(site, f"many-{module}", *words, **site.messages) as many:
        await eventually(lambda: many.log.count(SAID) >= 2, SECONDS)
        runs = {many.created(name) for _ in range(BACKLOG)}
        seen: set[str] = set()

        async def take(number: int) -> None:
            while True:  # reconnect, as a worker does
                with contextlib.suppress(ConnectionClosed, OSError):
                    async with Taker(many.socket, name, client_id=f"t{number}") as taker:
                        while True:
                            seen.add((await taker.receive(SECONDS))["id"])
                            await taker.ack()
                await asyncio.sleep(0.2)

        taking = [asyncio.create_task(take(number)) for number in range(3)]
        try:
            await eventually(lambda: seen == runs, SECONDS)
        except AssertionError:
            ended = [task.exception() for task in taking if task.done()]
            raise AssertionError(
                f"{len(seen)} of {len(runs)}, {ended}: {many.log[-3000:]}"
            ) from None
        finally:
            for task in taking:
                task.cancel()
            await asyncio.gather(*taking, return_exceptions=True)


@pytest.fixture
def bare(site: Site) -> Iterator[Pair]:
    """Yield two servers without Prefect's services, which run in a process of their own."""
    one, other = (Replica(site, f"bare-{n}", "--no-services", **site.messages) for n in range(2))
    words = ["-m", "prefect", "server", "services", "start"]
    settings = site.environment("services", **site.settings | site.messages)
    with started(one, other, Process(site, "services", words, settings)):
        yield one, other


def test_services_in_a_process_of_their_own(bare: Pair, site: Site) -> None:
    """Row E1: a run created at one server is completed by a worker of the other.

    The services run in a third process.
    """
    a, b = bare
    with worker(site, "apart", b.api):
        runs = site.run("delay.py", "10", "apart-", api=a.api)
        a.all_reach("Completed", runs)
    done = sorted(name for name in executed(site) if name.startswith("apart-"))
    assert done == [f"apart-{n}" for n in range(10)]
    assert all(SAID in replica.log for replica in bare)


class Background(Replica):
    """A server that its start command leaves running in the background."""

    def __init__(self, site: Site, name: str) -> None:
        """Link Prefect into a separate folder. The command puts Prefect's parent folder before ``PYTHONPATH``."""
        self.site = site
        alone = site.folder / "alone"
        alone.mkdir()
        (there,) = Path(site.python).parents[1].glob("lib/python*/site-packages/prefect")
        (alone / "prefect").symlink_to(there)
        path = os.pathsep.join([str(alone), site.environment(name)["PYTHONPATH"]])
        super().__init__(site, name, "--background", PYTHONPATH=path)

    def ready(self) -> Self:
        """Wait until the command has ended and the server responds."""
        wait_until(lambda: self.code is not None, "the command ends", seconds=SECONDS)
        assert self.code == 0, self.log

        def answers() -> bool:
            with contextlib.suppress(httpx2.TransportError):
                return self.client.get("/health").status_code == 200
            return False

        wait_until(answers, "the server answers", seconds=SECONDS, tick=0.1)
        return self

    def end(self) -> None:
        """Stop the server with Prefect's command."""
        ended = subprocess.run(
            [self.site.python, "-m", "prefect", "server", "stop"],
            env=self.site.environment(self.name),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


async def test_in_the_background(pair: Pair, site: Site, backend: RedisBackend) -> None:
    """Row E1: a server started with ``--background`` shares the queue. On ``server stop`` it returns an unacked run."""
    name = key()
    with Background(site, "background") as server:
        await shared(server, pair[0])
        run = pair[0].created(name)
        async with Taker(server.socket, name) as first:
            assert (await first.receive())["id"] == run
            server.end()
            assert (await first.closed(SECONDS))[0] == 1012
            async with Taker(pair[1].socket, name) as second:
                assert (await second.receive())["id"] == run
                (status,) = await backend.control.statuses(name, run)
                assert status is not None
                assert (status.attempt, status.losses) == (1, 0)
                await second.ack()
