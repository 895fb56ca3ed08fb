"""Several server processes on one port: sharing connections, crashes, drains and reloads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from websockets.exceptions import ConnectionClosed

from taskqueue_core.capabilities import control_of
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.tasks import QueueStats, State, Task
from taskqueue_redis import RedisBackend
from taskqueue_server.process import listeners, supervisor
from taskqueue_server.process.listeners import Port
from taskqueue_server.process.supervisor import Processes
from taskqueue_worker import Context
from taskqueue_worker import Worker as TaskWorker
from tests.redis.conftest import MakeServer
from tests.redis.serving import SECONDS, alive, serving
from tests.server.support import eventually, receipts, settings

pytestmark = pytest.mark.usefixtures("redis_url")


@contextlib.asynccontextmanager
async def store() -> AsyncIterator[RedisBackend]:
    """Open the Redis backend that the servers use."""
    async with contextlib.aclosing(RedisBackend()) as backend:
        yield backend


async def publish(backend: RedisBackend, count: int, *, start: int = 0) -> None:
    """Publish ``count`` tasks, numbered from ``start``."""
    numbers = range(start, start + count)
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in numbers))


async def stats(backend: RedisBackend, key: str = "k") -> QueueStats:
    """Return the statistics of a queue, whose ledger must balance."""
    found = await control_of(backend).stats(key)
    assert found.ledger.balanced
    return found


async def test_they_share_one_port(tmp_path: Path) -> None:
    """Fault A7: workers connect to all processes through one address.

    A drain of all processes loses no task and delivers none twice.
    """
    words = ("--backend", "redis", "--processes", "2")
    async with contextlib.AsyncExitStack() as stack:
        it = await stack.enter_async_context(
            serving(tmp_path, *words, drain="10", token="canary-7")
        )
        assert it.told["pid"] == it.process.pid
        assert len(it.pids()) == 2
        workers = [await stack.enter_async_context(it.worker(f"w{n}", credit=2)) for n in range(20)]
        async with httpx2.AsyncClient(base_url=it.url, trust_env=False) as client:
            for n in range(40):
                answer = await client.post("/v1/tasks", json={"key": "k", "id": f"t{n}"})
                assert answer.status_code == 201
        held = [receipts(await worker.deliveries(2)) for worker in workers]
        for pid in it.pids():
            shown = await asyncio.create_subprocess_exec(
                "ps", "-o", "args=", "-p", str(pid), stdout=asyncio.subprocess.PIPE
            )
            assert b"canary" not in (await shown.communicate())[0], "security 24: secrets in argv"

        it.send(signal.SIGTERM)
        for worker, got in zip(workers, held, strict=True):
            await worker.frame("drain")
            await worker.send("ack", receipts=got)
            assert await worker.settled(2) == (got, [])
            assert await worker.closed() == 1012
        assert await it.ended() == 0
        shares = [int(n) for n in re.findall(r"event='draining' connections=(\d+)", it.log())]
        assert len(shares) == 2
        assert min(shares) > 0, "a process without a connection"
        backend = await stack.enter_async_context(store())
        found = await stats(backend)
        assert (found.ledger.done, found.delivered, found.redelivered, found.lost) == (40, 40, 0, 0)
        await eventually(lambda: not any(map(alive, it.pids())), SECONDS)


async def test_a_killed_one_is_replaced(tmp_path: Path) -> None:
    """Fault A6: if a process is killed, another replaces it and no connection is refused.

    Its workers take their running tasks to another process. SIGHUP applies changed settings in every process, names
    those that need a restart, and ignores invalid ones. A second SIGTERM to the main process ends a drain early; a
    second one to a server process does not.
    """
    file = tmp_path / "taskqueue.toml"
    file.write_text("drain = 7\n")
    words = ("--backend", "redis", "--processes", "2")
    async with contextlib.AsyncExitStack() as stack:
        it = await stack.enter_async_context(serving(tmp_path, *words))
        backend = await stack.enter_async_context(store())
        await publish(backend, 8)
        workers = {
            name: await stack.enter_async_context(it.worker(name, credit=1))
            for name in (f"w{n}" for n in range(8))
        }
        held = {name: receipts(await worker.deliveries(1)) for name, worker in workers.items()}

        os.kill(it.pids()[0], signal.SIGKILL)
        async with httpx2.AsyncClient(base_url=it.url, trust_env=False) as client:
            while len(it.pids()) < 3:
                assert (await client.get("/ready", headers={"connection": "close"})).is_success
                await asyncio.sleep(0.05)  # leaves processor time for the new process
        moved = 0
        for name, got in held.items():
            try:
                await workers[name].send("ping", n=1)
                await workers[name].frame("pong")
            except ConnectionClosed:
                moved += 1
                again = it.worker(name, credit=1, holding=got)
                workers[name] = await stack.enter_async_context(again)
                assert again.welcome["adopted"] == got
            await workers[name].send("ack", receipts=got)
            assert await workers[name].settled(1) == (got, [])
        assert 0 < moved < 8
        found = await stats(backend)
        assert (found.ledger.done, found.delivered, found.redelivered, found.lost) == (8, 8, 0, 0)
        assert "starting another" in it.log()

        file.write_text("drain = 'canary'\n")
        it.send(signal.SIGHUP)
        await it.logs("reload failed, current settings stay in force")
        assert "TASKQUEUE_DRAIN" in it.log()
        assert "canary" not in it.log()
        file.write_text("drain = 90\nlease = 33\nport = 1\n")
        it.send(signal.SIGHUP)
        await it.logs("changed settings need a restart")
        await it.logs("settings='drain'")
        assert "settings='lease'" in it.log(), "the port was given, and so is not among them"

        await publish(backend, 24, start=8)  # more tasks than workers, so that some workers get two
        for worker in workers.values():
            await worker.send("credit", n=1)
            await worker.deliveries(1)
        for pid in it.pids()[1:] * 2:
            os.kill(pid, signal.SIGTERM)  # some service managers signal every process of a service
        it.send(signal.SIGTERM)
        for worker in workers.values():
            assert 80 < (await worker.frame("drain"))["seconds"] <= 90
        assert it.process.returncode is None
        it.send(signal.SIGTERM)
        assert await it.ended(30) == 0
        assert "Traceback" not in it.log()


async def test_restarting_one_by_one_under_load(tmp_path: Path) -> None:
    """Fault A7, A13: processes are restarted one by one while workers run tasks, and no task is lost.

    Fault A6: if the main process is killed, the server processes release their deliveries and end.
    """
    words = ("--backend", "redis", "--processes", "2")
    ran: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        it = await stack.enter_async_context(serving(tmp_path, *words, drain="0.1"))
        backend = await stack.enter_async_context(store())
        workers = [TaskWorker(url=it.url, worker_id=f"w{n}", concurrency=4) for n in range(6)]

        async def handle(context: Context) -> None:
            ran[context.task_id] += 1
            await asyncio.sleep(0.2)

        serving_workers = []
        for worker in workers:
            worker.task("k")(handle)
            serving_workers.append(asyncio.create_task(worker.serve()))
        count = 0
        for pid in it.pids():
            await publish(backend, 60, start=count)
            count += 60
            await eventually(lambda: len(ran) > count - 60, SECONDS)  # noqa: B023 - awaited in this iteration
            known = len(it.pids())
            os.kill(pid, signal.SIGTERM)
            await eventually(lambda: len(it.pids()) > known, SECONDS)  # noqa: B023 - awaited in this iteration

        async def over() -> bool:
            return (await stats(backend)).ledger.done == count

        await eventually(over, SECONDS)
        for worker in workers:
            worker.stop()
        await asyncio.gather(*serving_workers)
        found = await stats(backend)
        # A worker has two seconds to reconnect with its tasks, up to four; on a busy machine it may be late.
        assert found.redelivered <= 2 * 4 * len(workers)
        assert (found.delivered, found.lost) == (count + found.redelivered, 0)
        assert ran.total() - count <= found.redelivered

        (folder,) = metrics_of(it.pids()[-1])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        async with it.worker("w", credit=1) as last:
            await publish(backend, 1, start=count)
            await last.deliveries(1)
            it.process.kill()
            assert await last.closed(SECONDS) == 1012
        await eventually(lambda: not any(map(alive, it.pids())), SECONDS)
        (status,) = await control_of(backend).statuses("k", f"t{count}")
        assert status is not None
        assert (status.state, status.losses) == (State.WAITING, 0)
        assert not folder.exists()


def metrics_of(pid: int) -> list[Path]:
    """Return the folder in which a server process shares its metrics."""
    if sys.platform != "linux":
        return list(Path(tempfile.gettempdir()).glob("taskqueue-metrics-*"))
    variables = Path(f"/proc/{pid}/environ").read_text("utf-8").split("\0")
    name = "PROMETHEUS_MULTIPROC_DIR="
    return [Path(one.removeprefix(name)) for one in variables if one.startswith(name)]


class TestGivingUp:
    """Configurations with which the server cannot run end with an error."""

    async def test_a_backend_of_one_process(self) -> None:
        """A backend that is visible to one process only cannot be used with several processes."""
        with pytest.raises(
            ConfigurationError, match=r"TASKQUEUE_PROCESSES: .* is visible to one process only"
        ):
            await Processes(settings(processes=2), "memory").run()

    async def test_processes_that_end_at_once(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """If new processes end at once, the main process gives up after a few attempts with growing delays."""
        (tmp_path / "dying.py").write_text(
            "import os\n"
            "from taskqueue_redis import create_backend\n"
            "if 'PROMETHEUS_MULTIPROC_DIR' in os.environ:\n"
            "    os._exit(3)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(supervisor, "MAX_FAILED_STARTS", 2)
        with pytest.raises(TaskQueueError, match="right after their start"):
            await Processes(settings(processes=1), "dying:create_backend").run()
        assert caplog.text.count("starting another") == 1
        assert "giving up" in caplog.text

    async def test_a_store_that_refuses_its_configuration(
        self, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault B9: a configuration error, which no restart can fix, ends the server without another attempt."""
        server = make_server(config={"maxmemory-policy": "allkeys-lru"}).start()
        monkeypatch.setenv("TASKQUEUE_REDIS_URL", server.url)
        with pytest.raises(ConfigurationError, match="noeviction"):
            await Processes(settings(processes=1), "redis").run()

    def test_a_port_that_others_share(self) -> None:
        """A port in use by another service is refused, although the processes of one service share theirs."""
        first = Port(settings())
        number = int(first.url.rsplit(":", 1)[1])
        with contextlib.closing(first), first.share() as one, first.share() as two:
            one.listen()
            two.listen()
            with pytest.raises(ConfigurationError, match="TASKQUEUE_PORT"):
                Port(settings(port=number))
        Port(settings(port=number)).close()


def test_where_the_kernel_spreads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the operating system does not distribute connections, all processes accept from one socket."""
    monkeypatch.setattr(listeners, "_SPREADS", False)
    port = Port(settings())
    number = int(port.url.rsplit(":", 1)[1])
    with contextlib.closing(port), port.share() as one, port.share() as two:
        with socket.create_connection(("127.0.0.1", number), 5):
            taken, _ = one.accept()
        with taken, socket.create_connection(("127.0.0.1", number), 5):
            taken_too, _ = two.accept()
            taken_too.close()
        with pytest.raises(ConfigurationError, match="TASKQUEUE_PORT"):
            Port(settings(port=number))
