"""The start of the child processes of tasks with ``run="process"``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from taskqueue_core import Tasks
from taskqueue_core.errors import ConfigurationError
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.worker.fake import PATIENCE
from tests.worker.test_child_processes import gone


async def test_a_registry_without_a_path() -> None:
    """U8: a registry that a child cannot import is an error at the start, before the worker takes anything."""
    local = Tasks()

    @local.task(run="process")
    def crunch() -> None: ...

    with pytest.raises(ConfigurationError, match=r"'crunch'.* not a variable of a module"):
        await LocalWorker(local, backend=MemoryBackend()).serve()


@pytest.mark.parametrize(
    ("module", "error", "said"),
    [
        (
            "import os\nif os.getppid() != PID: raise RuntimeError('no GPU')",
            1,
            "RuntimeError: no GPU",
        ),
        ("", 0, ""),
    ],
)
def test_a_module_that_fails_in_a_child(tmp_path: Path, module: str, error: int, said: str) -> None:
    """U8: a module that a child cannot import ends the worker at its start, with the reason."""
    module = module.replace("PID", str(os.getpid()))
    (tmp_path / "shop.py").write_text(f"""{module}
from taskqueue_core import Tasks

tasks = Tasks()


@tasks.task(run="process")
def crunch() -> int:
    return 1
""")
    program = """
import asyncio
from shop import crunch, tasks
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from taskqueue_core import Queue
from taskqueue_worker import LocalWorker

async def main() -> None:
    backend = MemoryBackend()
    worker = LocalWorker(tasks, backend=backend)
    async with tasks.connect(Queue(backend)):
        handle = await crunch.publish()
        serving = asyncio.create_task(worker.serve())
        waiting = asyncio.create_task(handle.result())
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        await serving
        assert await waiting == 1

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == error, done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("now", [False, True])
def test_stopping_while_the_first_process_starts(tmp_path: Path, now: bool) -> None:  # noqa: FBT001
    """U8: a stop ends the start of the first child process, whose module may be slow to import."""
    (tmp_path / "shop.py").write_text(f"""
import os, pathlib, time
from taskqueue_core import Tasks

tasks = Tasks()
if os.getppid() != {os.getpid()}:
    pathlib.Path("started").write_text(str(os.getpid()))
    time.sleep(600)


@tasks.task(run="process")
def crunch() -> None: ...
""")
    program = f"""
import asyncio, pathlib
from shop import tasks
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker

async def main() -> None:
    worker = LocalWorker(tasks, backend=MemoryBackend())
    serving = asyncio.create_task(worker.serve())
    started = pathlib.Path("started")
    while not (started.exists() and started.read_text()):
        await asyncio.sleep(0.001)
    worker.stop(now={now})
    await serving

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=PATIENCE)
    assert gone(int((tmp_path / "started").read_text()))


def test_a_task_of_the_program_itself(tmp_path: Path) -> None:
    """U8: a task that is declared in the program that runs the worker is refused, with what to do."""
    (tmp_path / "app.py").write_text("""
from taskqueue_core import Tasks
from taskqueue_worker import LocalWorker

tasks = Tasks()


@tasks.task(run="process")
def crunch() -> int:
    return 1


if __name__ == "__main__":
    LocalWorker(tasks, backend="memory").run()
""")
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "move the tasks into a module of their own" in done.stderr
