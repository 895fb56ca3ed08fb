"""Fixtures that run commands in this process, on a shared in-memory store or through a real server."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from taskqueue_cli import main
from taskqueue_cli.output import console
from tests.cli.processes import process
from tests.cli.shared import Shared, renew


class Done(msgspec.Struct, frozen=True):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON value that the command printed on stdout."""
        return json.loads(self.out)


Cli = Callable[..., Done]


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the settings of the machine, and point the default server URL to a port without a server."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TASKQUEUE_BACKEND", "tests.cli.shared")
    monkeypatch.setenv("TASKQUEUE_SERVER_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("COLUMNS", "160")
    # set here because the console is created before the environment changes
    monkeypatch.setattr(console, "width", 160)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store() -> Shared:
    """The empty store that all commands of a test use."""
    return renew()


@pytest.fixture
def cli(store: Shared, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A function that runs a command and returns its exit code and output."""
    assert store.capabilities.shared

    def run(*words: str) -> Done:
        capsys.readouterr()
        code = main(words)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a real server process with a memory backend."""
    words = ("serve", "--port", "0", "--backend", "taskqueue_memory")
    with process(*words, stderr=None) as serving:
        assert serving.stdout is not None
        ready = json.loads(serving.stdout.readline())
        assert ready["backend"] == "taskqueue_memory"
        assert ready["pid"] == serving.pid
        yield ready["url"]
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0
        assert serving.stdout.read() == b""
