"""Connections of programs that are not async, such as web applications: to the end of the process, and after a fork."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from taskqueue_core import NotConnected, TaskQueueError, Tasks
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from tests.server.access import ADMIN, everybody
from tests.server.support import running

MODULE = """
from taskqueue_core import Tasks

tasks = Tasks()

@tasks.task
def resize(image: str) -> str:
    return image
"""

OPEN_TO_THE_END = (
    MODULE
    + """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
connection = tasks.connect_sync({backend!r})
connection.__enter__()
print(resize.publish_sync("cat.png").status().state)
"""
)

FORK = (
    MODULE
    + """
import os
connection = tasks.connect_sync({backend!r})
connection.__enter__()
before = resize.using(id="one").publish_sync("cat.png")
child = os.fork()
if not child:
    print("child", before.status().state, resize.using(id="two").publish_sync("a").status().state)
    connection.__exit__(None, None, None)
    raise SystemExit
_, status = os.waitpid(child, 0)
assert status == 0, status
print("parent", resize.handle_sync("two").status().state, before.status().state)
"""
)


FORK_WITH_AN_OBJECT = (
    MODULE
    + """
import os
from taskqueue_core import TaskQueueError
from taskqueue_memory import MemoryBackend

with tasks.connect_sync(MemoryBackend()):
    handle = resize.publish_sync("cat.png")
    child = os.fork()
    if not child:
        try:
            handle.status()
        except TaskQueueError as error:
            print("child", error)
        raise SystemExit
    _, status = os.waitpid(child, 0)
    print("parent", handle.status().state)
"""
)


def run(program: str, **env: str) -> list[str]:
    """Run a program to its end, and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"PYTHONWARNINGS": "ignore::DeprecationWarning"} | env,  # of fork
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("backend", ["memory", "redis"])
def test_a_connection_that_is_never_closed(backend: str, request: pytest.FixtureRequest) -> None:
    """U2: a program that opens a blocking connection and does not close it ends by itself; what is lost is logged."""
    if backend == "redis":
        request.getfixturevalue("redis_url")
    printed, *logged = run(OPEN_TO_THE_END.format(backend=backend))
    assert printed == "waiting"
    assert [line[:38] for line in logged] == ["published tasks are lost: 1 in resize;"] * (
        backend == "memory"
    )


async def test_a_connection_to_a_server_that_is_never_closed(tmp_path: Path) -> None:
    """U2: the same through a server."""
    async with running(MemoryBackend(), tokens_file=everybody(tmp_path / "t.toml")) as it:
        program = OPEN_TO_THE_END.format(backend="server")
        env = {"TASKQUEUE_SERVER_URL": it.server.url, "TASKQUEUE_TOKEN": ADMIN}
        assert await asyncio.to_thread(run, program, **env) == ["waiting"]


def test_a_forked_process_opens_its_own_connection(redis_url: str) -> None:  # noqa: ARG001
    """U2: connections and handles from before a fork work in the child and in the parent."""
    assert run(FORK.format(backend="redis")) == ["child waiting waiting", "parent waiting waiting"]


def test_a_backend_object_does_not_survive_a_fork() -> None:
    """U2: a forked process is asked to name its backend instead of waiting for ever."""
    child, parent = run(FORK_WITH_AN_OBJECT)
    assert "pass the name of the backend to connect_sync" in child
    assert parent == "parent waiting"


async def test_blocking_calls_through_an_async_connection() -> None:
    """U2: a thread, as of a ``def`` endpoint, uses the async connection; the event loop's own thread is refused."""
    tasks = Tasks()
    double = tasks.task("double")(_double)
    async with tasks.connect("memory"):
        handle = await asyncio.to_thread(double.publish_sync, 7)
        status = await asyncio.to_thread(double.handle_sync(handle.id).status)
        assert status is not None
        assert status.state is State.WAITING
        (many,) = await asyncio.to_thread(tasks.publish_many_sync, [double.call(8)])
        assert await double.handle(many.id).status() is not None
        with pytest.raises(TaskQueueError, match="publish instead of publish_sync"):
            double.publish_sync(7)
    with pytest.raises(NotConnected):
        await asyncio.to_thread(double.publish_sync, 7)
    with pytest.raises(TaskQueueError, match="closed"):
        await asyncio.to_thread(handle.status)


async def test_async_calls_with_a_blocking_connection() -> None:
    """U2: the error says that the open connection is a blocking one, and what to write."""
    tasks = Tasks()
    double = tasks.task("double")(_double)
    stack = ExitStack()
    await asyncio.to_thread(stack.enter_context, tasks.connect_sync("memory"))
    try:
        with pytest.raises(
            NotConnected, match=r"not async .*publish_sync.*async with tasks\.connect"
        ):
            await double.publish(7)
        with pytest.raises(NotConnected, match="handle_sync"):
            double.handle("x")
    finally:
        await asyncio.to_thread(stack.close)


def test_an_event_loop_that_has_stopped() -> None:
    """U2: a blocking call does not wait for an event loop that does not run."""
    tasks = Tasks()
    double = tasks.task("double")(_double)
    with asyncio.Runner() as runner:
        opened = tasks.connect("memory")
        runner.run(opened.__aenter__())
        with pytest.raises(TaskQueueError, match=r"has stopped.*connect_sync"):
            double.publish_sync(7)
        runner.run(opened.__aexit__(None, None, None))


def _double(number: int) -> int:
    return 2 * number
