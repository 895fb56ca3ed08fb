"""The options of ``taskqueue worker``: which tasks, health, several processes, reload."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from http import HTTPStatus
from pathlib import Path

import httpx2
import pytest

from taskqueue_cli.worker_board import ALIVE_SECONDS, Board, HealthFile
from taskqueue_cli.worker_health import HealthServer
from taskqueue_core import Tasks
from taskqueue_core.errors import ConfigurationError
from taskqueue_core.protocol.frames import AckFrame, Bye, Progress
from taskqueue_redis.embedded.watchdog import Watchdog
from taskqueue_worker import LocalWorker
from taskqueue_worker.report import WorkerReport
from tests.worker.fake import PATIENCE, FakeServer, Peer, work

MODULE = """
import os, time
from taskqueue_core import Context, Tasks

tasks = Tasks()


@tasks.task
async def version() -> int:
    return 1


@tasks.task
def pid() -> int:
    return os.getpid()


@tasks.task
def crash() -> None:
    os._exit(9)


@tasks.task
def wait(context: Context, path: str) -> str:
    context.progress(0)
    while not os.path.exists(path):
        time.sleep(0.01)
    return "waited"
"""


@asynccontextmanager
async def command(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """Run ``taskqueue worker`` for the module in a folder; it ends with the block at the latest."""
    module = folder / "shop.py"
    if not module.exists():
        module.write_text(MODULE)
    with closing(Watchdog("KILL")) as watchdog:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "taskqueue_cli", "worker", "shop:tasks", "--json", *words),
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdout=PIPE,
        )
        watchdog.watch(child.pid)
        try:
            yield child
        finally:
            if child.returncode is None:
                child.kill()
            await child.communicate()


async def ready(child: Process) -> dict[str, object]:
    """Wait until the command says that it works, and return what it says."""
    assert child.stdout
    async with asyncio.timeout(PATIENCE):
        said: dict[str, object] = json.loads(await child.stdout.readline())
    return said


async def result(peer: Peer, key: str) -> object:
    """Run a task and return its result."""
    await peer.deliver(delivery := work({}, key=key))
    ack = await peer.next(AckFrame)
    return json.loads(bytes(ack.results[delivery.receipt]))


async def eventually(client: httpx2.AsyncClient, path: str, status: int) -> str:
    """Wait until a path has a status, and return the text of the response."""
    async with asyncio.timeout(PATIENCE):
        while (answer := await client.get(path)).status_code != status:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    return answer.text


async def metric(client: httpx2.AsyncClient, line: str) -> str:
    """Wait until the metrics contain a line, and return them."""
    async with asyncio.timeout(PATIENCE):
        while line not in (text := (await client.get("/metrics")).text):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    return text


def tasks_of(*names: str, queue: str | None = None) -> Tasks:
    """Return a registry of tasks with these names."""
    tasks = Tasks()
    for name in names:

        @tasks.task(name, queue=queue)
        async def run() -> None: ...

    return tasks


def test_only_some_tasks() -> None:
    """U10: a worker may be restricted to some tasks; a name that does not exist is an error that lists the names."""
    worker = LocalWorker(tasks_of("a", "b", "c"))
    worker.configure(only=["b", "c"])
    assert worker.keys == ("b", "c")
    with pytest.raises(ConfigurationError, match="no task 'd'; the tasks are: a, b, c"):
        worker.configure(only=["d"])
    worker.configure(only=["a"])
    assert LocalWorker.of(worker).keys == ("a",)


def test_only_keeps_shared_queues_together() -> None:
    """U10: a worker cannot take some tasks of a queue and leave the others."""
    worker = LocalWorker(tasks_of("a", "b", queue="q"))
    with pytest.raises(ConfigurationError, match="'b' shares the queue 'q'"):
        worker.configure(only=["a"])
    worker.configure(only=["a", "b"])
    assert worker.keys == ("q",)


async def test_health_of_one_process(server: FakeServer, tmp_path: Path) -> None:
    """U10: ``/ready`` follows the welcome and the stop, ``/alive`` the loop; ``/metrics`` counts; a file is touched."""
    file, release = tmp_path / "alive", tmp_path / "release"
    words = ("--health", "127.0.0.1:0", "--health-file", str(file), "--url", server.url)
    async with command(tmp_path, *words) as child:
        peer = await server.welcomed()
        url = str((await ready(child))["health"])
        assert file.exists()
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
            await eventually(client, "/ready", 200)
            assert (await client.get("/alive")).text == "alive\n"
            assert await result(peer, "version") == 1
            await peer.deliver(work({"path": str(release)}, key="wait"))
            await peer.next(Progress)
            metrics = await metric(client, "running_tasks 1.0")
            assert 'taskqueue_worker_tasks_total{outcome="success",queue="version"} 1.0' in metrics
            assert (await client.get("/nowhere")).status_code == 404
            assert (await client.post("/ready")).status_code == 405
            child.terminate()
            assert await eventually(client, "/ready", 503) == "not connected, or stopping\n"
            assert (await client.get("/alive")).status_code == 200
        release.touch()
        await peer.next(Bye)
        assert await child.wait() == 0


async def test_several_processes(server: FakeServer, tmp_path: Path) -> None:
    """U10: the parent restarts a process that dies, reports the health of all, and drains all after SIGTERM."""
    release = tmp_path / "release"
    words = ("--processes", "2", "--health", "127.0.0.1:0", "--worker-id", "w")
    async with command(tmp_path, *words, "--url", server.url) as child:
        first = await server.welcomed()
        second = await server.accept()
        assert {first.hello.worker_id, second.hello.worker_id} == {"w-1", "w-2"}
        said = asyncio.create_task(ready(child))
        await first.deliver(work({"path": str(release)}, key="wait"))
        await first.next(Progress)
        assert not said.done()
        await second.welcome()
        told = await said
        assert (told["processes"], told["pid"]) == (2, child.pid)
        async with httpx2.AsyncClient(base_url=str(told["health"]), trust_env=False) as client:
            await eventually(client, "/ready", 200)
            before = await result(second, "pid")
            await metric(client, 'queue="pid"} 1.0')
            await second.deliver(work({}, key="crash"))
            await second.end()
            await eventually(client, "/ready", 503)
            third = await server.welcomed()
            assert third.hello.worker_id == "w-3"
            await eventually(client, "/ready", 200)
            assert await result(third, "pid") != before
            await metric(client, 'queue="pid"} 2.0')
        child.send_signal(signal.SIGINT)
        await third.next(Bye)
        assert first.settled() == []
        release.touch()
        await first.next(AckFrame)
        await first.next(Bye)
        assert await child.wait() == 0


async def test_the_end_of_the_parent(server: FakeServer, tmp_path: Path) -> None:
    """U10: worker processes whose parent was killed drain and end."""
    async with command(tmp_path, "--processes", "2", "--url", server.url) as child:
        peers = [await server.welcomed(), await server.welcomed()]
        await ready(child)
        child.kill()
        for peer in peers:
            await peer.next(Bye)


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--only", "nothing"], 2), (["--url", "REFUSES"], 4), (["--backend", "memory"], 2)],
)
async def test_processes_that_cannot_start(
    server: FakeServer, tmp_path: Path, words: list[str], code: int
) -> None:
    """U10: a wrong configuration and a refusal end all processes at once, with the exit code of one process."""
    server.refuse = HTTPStatus.UNAUTHORIZED
    words = [server.url if word == "REFUSES" else word for word in words]
    async with command(tmp_path, "--processes", "2", *words) as child:
        async with asyncio.timeout(PATIENCE):
            assert await child.wait() == code


async def test_reload(server: FakeServer, tmp_path: Path) -> None:
    """U10: after a change a new process gets the next tasks, and the old one ends its own.

    A change that cannot be imported does nothing.
    """
    release = tmp_path / "release"
    async with command(tmp_path, "--reload", "--url", server.url) as child:
        old = await server.welcomed()
        await ready(child)
        await old.deliver(work({"path": str(release)}, key="wait"))
        await old.next(Progress)
        (tmp_path / "shop.py").write_text("broken =")
        assert await result(old, "version") == 1
        (tmp_path / "shop.py").write_text(MODULE.replace("return 1", "return 2"))
        new = await server.welcomed()
        assert await result(new, "version") == 2
        assert old.settled()[1:] == []
        release.touch()
        await old.next(AckFrame)
        await old.next(Bye)
        child.terminate()
        await new.next(Bye)
        assert await child.wait() == 0


class _Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def _report(**fields: object) -> WorkerReport:
    return WorkerReport(keys=("k",), concurrency=3, grace=1.0, **fields)  # type: ignore[arg-type]


def test_a_loop_that_does_not_turn() -> None:
    """U10: without a report of each process for 5 s the worker is not alive, and not ready."""
    clock = _Clock()
    board = Board(2, clock)
    assert (board.alive(), board.ready()) == (True, False)
    board.put(1, _report(ready=True))
    board.put(2, _report(ready=True))
    assert (board.alive(), board.ready()) == (True, True)
    clock.time = ALIVE_SECONDS
    board.put(1, _report(ready=True))
    assert board.alive()
    clock.time += 0.1
    assert (board.alive(), board.ready()) == (False, False)
    board.remove(2)
    assert (board.alive(), board.ready()) == (True, False)


def test_ended_processes_are_counted() -> None:
    """U10: what a process did stays in the metrics after its end."""
    board = Board(1)
    board.put(1, _report(outcomes={"k": {"success": 2}}))
    board.remove(1)
    board.put(2, _report(outcomes={"k": {"success": 1, "failure": 1}}, running=1))
    reports, ended = board.total()
    assert [report.running for report in reports] == [1]
    assert ended == {("k", "success"): 3, ("k", "failure"): 1}


@pytest.mark.parametrize(
    "make",
    [
        lambda: HealthServer("127.0.0.1", Board(1)),
        lambda: HealthServer("127.0.0.1:http", Board(1)),
        lambda: HealthServer("http://127.0.0.1:1", Board(1)),
        lambda: HealthServer("203.0.113.1:80", Board(1)),
        lambda: HealthFile(Path("/nowhere/at/all")),
    ],
)
def test_wrong_health_options(make: Callable[[], object]) -> None:
    """U10: an address that is none, or that cannot be used, is an error that names the option."""
    with pytest.raises(ConfigurationError, match="--health"):
        make()
