"""The first steps of the README run as written."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.docs.programs import PATIENCE, background, blocks, run
from tests.ports import free_port
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


class Shell:
    """Runs the commands of a console block; commands that end in ``&`` run in the background."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._options: dict[str, Any] = {"cwd": folder, "env": environment}
        self._background = ExitStack()

    def run(self, command: str) -> str:
        """Run one command and return its output, or the first line of output of a background command."""
        words = shlex.split(command, comments=True)
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        if words[-1] != "&":
            return run(*words, **self._options)
        log = self._background.enter_context((self._options["cwd"] / "log.txt").open("a"))
        started = self._background.enter_context(
            background(words[:-1], **self._options, stderr=log)
        )
        assert started.stdout is not None
        return started.stdout.readline()

    def insist(self, command: str) -> str:
        """Run a command, and retry while it fails, because a result may not exist yet."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self.run(command)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """End the background processes, the last one first. They must have closed what they opened."""
        self._background.close()
        log = self._options["cwd"] / "log.txt"
        assert not log.exists() or "ResourceWarning" not in log.read_text()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in a folder with the files of the README, with a free port for the server."""
    for text in blocks(README, "python"):
        name = text.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(text)
    port = free_port()
    shell = Shell(
        tmp_path,
        {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "COLUMNS": "200",
            "TASKQUEUE_PORT": str(port),
            "TASKQUEUE_SERVER_URL": f"http://127.0.0.1:{port}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "always::ResourceWarning",
        },
    )
    yield shell
    shell.close()


def test_first_steps(shell: Shell) -> None:
    """E7, G5, G7: the commands from the server to the result print what the README shows."""
    (session,) = (block for block in blocks(README, "console") if "publish.py" in block)
    lines = [line for line in session.splitlines() if not line.startswith("$ pip install")]
    for line, following in zip(lines, [*lines[1:], "$ end"], strict=True):
        if line.startswith("$ "):
            printed = shell.insist(line.removeprefix("$ "))
            if not following.startswith("$ "):
                assert _plain(printed) == _plain(following), line


def test_durable_servers(shell: Shell, tmp_path: Path) -> None:
    """G5: a durable server, with embedded Redis or with a Redis server, is started by one command."""
    engine = find_engine()
    (session,) = (block for block in blocks(README, "console") if "--embedded-redis" in block)
    embedded, real = re.findall(r"^\$ (.+)$", session, flags=re.MULTILINE)
    assert "embedded Valkey 9." in _plain(shell.run(f"{embedded.partition('#')[0]} &"))
    shell.close()
    with RedisServer(engine, tmp_path / "redis") as redis:
        command = f"env {real.replace(':6379', f':{redis.port}')} &"
        assert "serving redis at http://127.0.0.1:PORT" in _plain(shell.run(command))
        shell.close()


def test_the_two_commands_are_the_only_set_up() -> None:
    """G1: the first console block contains only commands of dev.py."""
    first = blocks(README, "console")[0]
    assert re.findall(r"^\$ python3 dev.py (\w+)", first, flags=re.MULTILINE) == [
        "run",
        "test",
        "test",
    ]


def _plain(text: str) -> str:
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", " ".join(text.split()))
