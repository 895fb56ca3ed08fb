"""Lifespans of registries, and the state that handlers get from them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core import Context, Queue, Tasks
from taskqueue_core.errors import ConfigurationError
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.application.running import OpenWorld, working
from tests.worker.fake import PATIENCE

ROOT = Path(__file__).parents[2]


async def test_each_registry_has_its_own_state(world: OpenWorld) -> None:
    """U9: a lifespan is open from before the first task to after the last one; each registry has its own."""
    events: list[str] = []
    app, mail, other = Tasks(prefix="app."), Tasks(prefix="mail."), Tasks(prefix="other.")
    app.include(mail)

    def declare(tasks: Tasks, name: str) -> None:
        @tasks.lifespan
        async def lifespan() -> AsyncIterator[dict[str, str]]:
            events.append(f"open {name}")
            yield {"name": name}
            events.append(f"close {name}")

    declare(app, "app")
    declare(other, "other")

    @app.task
    async def one(context: Context[dict[str, str]]) -> str:
        events.append("task")
        return context.state["name"]

    @mail.task
    def two(context: Context[dict[str, str]]) -> str:
        events.append("task")
        return context.state["name"]

    three = other.task("three")(one.function)
    async with world() as (backend, worker), app.connect(Queue(backend)) as queue:
        handles = [await each.using(on=queue).publish() for each in (one, two, three)]
        async with working(worker(app, other)):
            # The registry of the second task has no lifespan, so it has the state of the one that includes it.
            assert [await handle.result(PATIENCE) for handle in handles] == ["app", "app", "other"]
    assert events == ["open app", "open other", *["task"] * 3, "close other", "close app"]


async def test_a_lifespan_that_fails_to_open() -> None:
    """U9: the worker ends with the error before it takes anything, and closes what was open."""
    events: list[str] = []
    first, second = Tasks(prefix="a."), Tasks(prefix="b.")

    @first.lifespan
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            yield
        finally:
            events.append("closed")

    @second.lifespan
    async def broken() -> AsyncIterator[None]:
        if not events:
            raise LookupError("no such database")
        yield

    @first.task
    async def run() -> None:
        events.append("run")

    backend = MemoryBackend()
    async with first.connect(Queue(backend)) as queue:
        handle = await run.publish()
        with pytest.raises(LookupError, match="no such database"):
            await LocalWorker(first, second, backend=backend).serve()
        status = await handle.status()
        assert (await queue.ledger()).waiting == 1
        assert (events, status and status.attempt) == (["closed"], 1)


def test_the_exit_code(tmp_path: Path) -> None:
    """U9: the command ends with exit code 1 if a lifespan raises an exception, and names it."""
    (tmp_path / "broken.py").write_text(
        "from taskqueue_core import Tasks\n"
        "tasks = Tasks()\n"
        "@tasks.task\n"
        "def run() -> None: ...\n"
        "@tasks.lifespan\n"
        "async def lifespan():\n"
        "    raise LookupError('no such database')\n"
        "    yield\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "taskqueue_cli", "worker", "broken:tasks", "--backend", "memory"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "no such database" in done.stderr


async def test_a_stop_while_a_lifespan_opens() -> None:
    """U9: a worker that is stopped while a lifespan opens ends at once, and takes nothing."""
    tasks = Tasks()
    opening = asyncio.Event()
    ended: list[str] = []

    @tasks.lifespan
    async def lifespan() -> AsyncIterator[None]:
        try:
            opening.set()
            await asyncio.sleep(3600)
            yield
        finally:
            ended.append("cancelled")

    @tasks.task
    async def run() -> None:
        raise AssertionError

    worker = LocalWorker(tasks, backend=MemoryBackend())
    async with asyncio.timeout(PATIENCE):
        serving = asyncio.create_task(worker.serve())
        await opening.wait()
        worker.stop()
        worker.stop(now=True)
        await serving
    assert ended == ["cancelled"]


async def test_a_timeout_in_a_lifespan_is_an_error() -> None:
    """U9: a lifespan that raises ``TimeoutError`` ends the worker with it; that is no stop."""
    tasks = Tasks()
    tasks.task("run")(signal.getsignal)

    @tasks.lifespan
    async def lifespan() -> AsyncIterator[None]:
        if tasks.functions:
            raise TimeoutError("the database does not answer")
        yield

    with pytest.raises(TimeoutError, match="does not answer"):
        await LocalWorker(tasks, backend=MemoryBackend()).serve()


def test_wrong_lifespans() -> None:
    """U9: what is no lifespan is refused at import, with the form to write."""
    tasks = Tasks()

    async def coroutine() -> None: ...

    async def needs(url: str) -> AsyncIterator[str]:
        yield url

    async def right() -> AsyncIterator[None]:
        yield

    wrong: list[tuple[Any, str]] = [
        (coroutine, "an async function with one yield"),
        (3, "got a int; expected an async function"),
        (needs, "takes no parameters, but needs has url"),
    ]
    for function, fault in wrong:
        with pytest.raises(ConfigurationError, match=fault):
            tasks.lifespan(function)
    assert tasks.lifespan(right) is right
    with pytest.raises(ConfigurationError, match="has a lifespan already"):
        tasks.lifespan(right)
