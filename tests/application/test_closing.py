"""Lifespans and shared dependencies that hang while they close: a stop at once, and the process, end in spite of it."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path

import pytest

from taskqueue_core import Queue, Shared, Tasks
from taskqueue_core.application.dependencies import SHARED_DEPENDENCIES
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from taskqueue_worker.quarantine import Quarantine
from tests.application.running import working
from tests.worker.fake import PATIENCE
from tests.worker.local import until

VARIABLE: ContextVar[str] = ContextVar("variable")


class Gate:
    """Something that hangs while it closes."""

    def __init__(self, *, ignores: bool) -> None:
        """With ``ignores``, it ignores its cancellation, until `open` is set."""
        self.ignores = ignores
        self.closing = asyncio.Event()
        self.open = asyncio.Event()

    async def close(self) -> None:
        """Hang."""
        self.closing.set()
        while not self.open.is_set():
            try:
                await self.open.wait()
            except asyncio.CancelledError:
                if not self.ignores:
                    raise


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the errors in the log of the worker."""
    return [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("place", ["lifespan", "shared"])
@pytest.mark.parametrize("early", [False, True])
async def test_what_hangs_is_given_up(
    place: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ignores: bool,
    early: bool,
) -> None:
    """U9: a stop at once, before or during the closing, cancels what hangs; the log names it, and the others close."""
    monkeypatch.setattr("taskqueue_worker.closing.CLEANUP_SECONDS", 0.01)
    monkeypatch.setattr("taskqueue_worker.closing.CLOSE_SECONDS", 0.01)
    gate = Gate(ignores=ignores)
    closed: list[str] = []
    first, second = Tasks(prefix="a."), Tasks(prefix="b.")

    @first.lifespan
    async def outer() -> AsyncIterator[None]:
        yield
        closed.append("outer")

    @second.lifespan
    async def inner() -> AsyncIterator[None]:
        yield
        if place == "lifespan":
            await gate.close()
        closed.append("inner")

    @asynccontextmanager
    async def pool() -> AsyncIterator[int]:
        yield 17
        if place == "shared":
            await gate.close()
        closed.append("pool")

    @second.task
    async def run(shared: int = Shared(pool)) -> int:
        return shared

    backend = MemoryBackend()
    worker = LocalWorker(first, second, backend=backend)
    async with asyncio.timeout(PATIENCE), second.connect(Queue(backend)):
        serving = asyncio.create_task(worker.serve())
        assert await (await run.publish()).result() == 17
        worker.stop(now=early)
        await gate.closing.wait()
        assert not serving.done()
        if not early:
            worker.stop(now=True)
        await serving
    name = "inner" if place == "lifespan" else "pool"
    (error,) = errors_of(caplog)
    assert name in error
    assert ("ignores its cancellation" if ignores else "was cancelled while it closed") in error
    assert closed == [each for each in ("pool", "inner", "outer") if each != name]
    gate.open.set()


async def test_cancelling_the_worker_cancels_the_closing() -> None:
    """U9: a second cancellation of `serve` cancels what closes, and the others close."""
    gate = Gate(ignores=False)
    tasks = Tasks()
    tasks.task("run")(signal.getsignal)
    closed = []

    @tasks.lifespan
    async def lifespan() -> AsyncIterator[None]:
        try:
            yield
        finally:
            try:
                await gate.close()
            finally:
                closed.append(True)

    serving = asyncio.create_task(LocalWorker(tasks, backend=MemoryBackend()).serve())
    async with asyncio.timeout(PATIENCE):
        await asyncio.sleep(0)
        while not gate.closing.is_set():
            serving.cancel()
            await asyncio.sleep(0.01)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert closed == [True]


async def test_a_task_group_in_a_lifespan() -> None:
    """U9: a task of a lifespan that fails ends the worker with its error, after the running handlers."""
    events: list[str] = []
    started = asyncio.Event()
    tasks = Tasks()

    async def watch() -> None:
        await started.wait()
        raise LookupError("the watch has failed")

    @tasks.lifespan
    async def lifespan() -> AsyncIterator[None]:
        VARIABLE.set("of the lifespan")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(watch())
                yield
        finally:
            events.append("closed")

    @tasks.task
    async def run() -> None:
        assert VARIABLE.get() == "of the lifespan"
        started.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            events.append("run has ended")

    backend = MemoryBackend()
    async with asyncio.timeout(PATIENCE), tasks.connect(Queue(backend)):
        await run.publish()
        with pytest.raises(ExceptionGroup) as caught:
            await LocalWorker(tasks, backend=backend).serve()
    assert caught.group_contains(LookupError)
    assert events == ["run has ended", "closed"]
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_the_end_of_the_program() -> None:
    """U9: if all asyncio tasks are cancelled at once, as by the end of `asyncio.run`, handlers end first."""
    events: list[str] = []
    started = asyncio.Event()
    tasks = Tasks()

    @tasks.lifespan
    async def lifespan() -> AsyncIterator[None]:
        try:
            yield
        finally:
            events.append("closed")

    @tasks.task
    async def run() -> None:
        started.set()
        try:
            await asyncio.sleep(PATIENCE)
        finally:
            await asyncio.sleep(0.01)
            events.append("run has ended")

    backend = MemoryBackend()
    async with tasks.connect(Queue(backend)):
        await run.publish()
        before = asyncio.all_tasks()
        serving = asyncio.create_task(LocalWorker(tasks, backend=backend).serve())
        await started.wait()
        for task in asyncio.all_tasks() - before:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert events == ["run has ended", "closed"]


async def test_a_failure_to_open_leaves_nothing() -> None:
    """U9: attempts in which a dependency of a shared dependency is open, but not it itself, add nothing to close."""
    tasks = Tasks()
    opened: list[str] = []

    @asynccontextmanager
    async def pool() -> AsyncIterator[str]:
        opened.append("pool")
        yield "pool"
        opened.append("closed")

    async def model(db: str = Shared(pool)) -> str:
        if len(opened) < 100:
            opened.append("failed")
            raise LookupError(db)
        return f"model of {db}"

    @tasks.task(retry=200)
    async def run(model: str = Shared(model)) -> str:
        return model

    @tasks.task
    async def count(_: str = Shared(pool)) -> list[str]:
        return [name for name, _ in SHARED_DEPENDENCIES.get().opened]

    backend = MemoryBackend()
    worker = LocalWorker(tasks, backend=backend, quarantine=lambda: Quarantine(limit=sys.maxsize))
    async with tasks.connect(Queue(backend)), working(worker):
        handles = [await run.publish() for _ in range(98)]
        async with asyncio.timeout(PATIENCE):
            await until(lambda: len(opened) == len(handles) + 1)
        assert opened == ["pool", *["failed"] * 98]
        (name,) = await (await count.publish()).result(PATIENCE)
        assert name.endswith("pool")
    assert opened == ["pool", *["failed"] * 98, "closed"]


PROGRAM = """
import asyncio, sys, time
from contextlib import asynccontextmanager
from taskqueue_core import Tasks
from taskqueue_worker import closing, process_end

closing.CLOSE_SECONDS = 0.1
process_end.END_SECONDS = 2.0
tasks = Tasks()

async def ignore():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def hang():
    print("closing", flush=True)
    match {how!r}:
        case "asleep": await asyncio.sleep(3600)
        case "ignoring": await ignore()
        case "in a thread": await asyncio.to_thread(time.sleep, 3600)
        case "blocking": time.sleep(3600)

@tasks.lifespan
async def pool():
    yield
    await hang()

@tasks.task{options}
def run() -> None: ...

async def main():
    from taskqueue_worker import LocalWorker
    worker = LocalWorker(tasks, backend="memory")
    serving = asyncio.create_task(worker.serve(on_ready=lambda: print("working for 1 task", flush=True)))
    await asyncio.to_thread(sys.stdin.readline)
    worker.stop()
    await asyncio.to_thread(sys.stdin.readline)
    worker.stop(now=True)
    await serving

if __name__ == "__main__":
    asyncio.run(main())
"""


def ended(
    folder: Path, words: list[str], stop: Callable[[subprocess.Popen[str]], None]
) -> tuple[int, str]:
    """Run a program whose lifespan hangs, stop it twice, and return its exit code and its output."""
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines: list[str] = []
        watch = threading.Timer(PATIENCE, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if "working for" in line or line == "closing\n":
                    stop(process)
            return process.wait(PATIENCE), "".join(lines)
        finally:
            watch.cancel()
            process.kill()


def by_signal(process: subprocess.Popen[str]) -> None:
    """Send the usual signal."""
    process.terminate()


def by_word(process: subprocess.Popen[str]) -> None:
    """Let the program call `stop`."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("asleep", 0, "the lifespan hanging.pool was cancelled while it closed"),
        ("ignoring", 0, "the lifespan hanging.pool ignores its cancellation"),
        ("in a thread", 1, "the lifespan hanging.pool was cancelled while it closed"),
        ("blocking", 1, "the lifespan hanging.pool keeps the process from ending"),
    ],
)
def test_the_second_signal_ends_the_command(
    tmp_path: Path, how: str, code: int, message: str
) -> None:
    """U9: the second SIGTERM ends ``taskqueue worker`` whatever its lifespan does, and the log names the lifespan."""
    (tmp_path / "hanging.py").write_text(PROGRAM.format(how=how, options=""))
    words = ["-m", "taskqueue_cli", "worker", "hanging:tasks", "--backend", "memory"]
    result, output = ended(tmp_path, words, by_signal)
    assert message in output
    assert (result, "Traceback" in output) == (code, False), output


@pytest.mark.skipif(sys.platform == "win32", reason="child processes need Linux or macOS")
@pytest.mark.parametrize("how", ["asleep", "ignoring", "blocking"])
def test_the_end_of_a_child_process(tmp_path: Path, how: str) -> None:
    """U9: a child process whose lifespan hangs ends by itself, and the log of the worker names the lifespan."""
    text = PROGRAM.format(how=how, options="(run='process')")
    (tmp_path / "hanging.py").write_text(
        text.replace(
            "async def hang():", "async def hang():\n    if not sys.argv[-1].isdigit(): return"
        )
    )
    words = ["-m", "taskqueue_cli", "worker", "hanging:tasks", "--backend", "memory"]
    result, output = ended(tmp_path, words, by_signal)
    assert "the lifespan hanging.pool" in output
    assert result == 0, output


@pytest.mark.parametrize("how", ["asleep", "ignoring"])
def test_a_stop_at_once_ends_a_program(tmp_path: Path, how: str) -> None:
    """U9: a program with a worker in its event loop ends after ``stop(now=True)``."""
    (tmp_path / "hanging.py").write_text(PROGRAM.format(how=how, options=""))
    result, output = ended(tmp_path, ["hanging.py"], by_word)
    assert "the lifespan __main__.pool" in output
    assert result == 0, output
