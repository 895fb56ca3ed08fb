"""The page about the HTTP API: responses are as shown, and its table lists the operations of the server."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskqueue_core.config import Settings
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from tests.binaries import curl
from tests.docs.programs import blocks, run
from tests.server.in_thread import in_thread

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "http.md").read_text()
COMMANDS = [
    one
    for block in blocks(PAGE, "console")
    for one in re.findall(r"^\$ (.+)\n((?:(?!\$ ).+\n)*)", block, re.MULTILINE)
]


async def _bury(backend: MemoryBackend) -> None:
    """Create the dead letters that the page mentions."""
    said = ("timeout of the printer", "timeout", "timeout", "no paper", "a timeout")
    errors = {f"r{number}": error for number, error in enumerate(said, 1)}
    await backend.publisher.publish(*(Task(key="reports", id=i) for i in errors))
    subscription = backend.subscribe(["reports"], "w")
    for delivery in (await subscription.receive(len(errors), 0)).deliveries:
        await subscription.dead_letter(delivery, "max_attempts", errors[delivery.task.id])
    await subscription.close()


@pytest.fixture
def port() -> Iterator[str]:
    """Run a server with the tasks that the page describes; yield its port."""
    backend = MemoryBackend()
    asyncio.run(_bury(backend))
    with in_thread(ServerProcess(backend, Settings(port=0))) as server:
        yield server.url.rpartition(":")[2]


def test_the_commands(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C17: each command prints what the page shows; "..." on the page stands for any text."""
    curl()
    monkeypatch.delenv("http_proxy", raising=False)
    for command, shown in COMMANDS:
        here = command.replace("localhost:8420", f"127.0.0.1:{port}")
        words = shlex.split(re.sub(r"\$('[^']*')", lambda m: m[1].replace("\\n", "\n"), here))
        printed = run(*words).strip()
        expected = ".*".join(re.escape(part) for part in shown.strip().split("..."))
        assert re.fullmatch(expected, printed, re.DOTALL), (command, printed)


def test_the_table() -> None:
    """The table lists exactly the operations of the server, with the verb that each requires."""
    run(sys.executable, "tools/http_table.py", "--check", cwd=ROOT)
