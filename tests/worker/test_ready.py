"""A worker says that it works only once that is true."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE

from taskqueue_core.protocol.frames import Bye
from taskqueue_worker import LocalWorker
from tests.server.flaky import Flaky
from tests.worker.fake import PATIENCE, FakeServer
from tests.worker.local import until


async def test_the_command_waits_for_the_welcome(server: FakeServer) -> None:
    """U10: ``taskqueue worker`` says "connecting to", and "working for" only after the server's welcome."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taskqueue_cli", "worker", "tests.cli.work:worker"),
        *("--url", server.url, "--log-level", "error"),
        stdout=PIPE,
    )
    assert child.stdout
    try:
        async with asyncio.timeout(PATIENCE):
            peer = await server.accept()
            assert (await child.stdout.readline()).decode() == f"○ connecting to {server.url}\n"
            assert child.stdout.at_eof() is False
            await peer.welcome()
            assert "● working for double, who" in (await child.stdout.readline()).decode()
            child.send_signal(signal.SIGTERM)
            await peer.next(Bye)
            assert await child.stdout.read() == b""
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_a_local_worker_is_ready_when_the_store_answers() -> None:
    """U10: a local worker is ready after the first answer of the store, and not during an outage or while it stops."""
    backend = Flaky()
    backend.down.set()
    worker = LocalWorker(backend=backend)

    @worker.task("work")
    async def work() -> None: ...

    reports: list[bool] = []
    task = asyncio.create_task(worker.serve(on_ready=lambda: reports.append(worker.ready)))
    try:
        await until(lambda: len(backend.calls) > 1)
        assert [worker.ready] == [False]
        assert reports == []
        backend.down.clear()
        await until(lambda: reports)
        assert reports == [True]
        assert [worker.ready] == [True]
        worker.stop()
        assert [worker.ready] == [False]
    finally:
        worker.stop(now=True)
        await task
