"""Commands in this process, on a store that they share, or through a real server."""

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
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> Any:
        """The one JSON value on stdout."""
        return json.loads(self.out)


Cli = Callable[..., Done]


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine reach a test, and no server can be met by chance."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TASKQUEUE_BACKEND", "tests.cli.shared")
    monkeypatch.setenv("TASKQUEUE_SERVER_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(console, "width", 160)  # it may have been made long before
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store() -> Shared:
    """The empty store that commands share."""
    return renew()


@pytest.fixture
def cli(store: Shared, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command and return what it left."""
    assert store.capabilities.shared

    def run(*words: str) -> Done:
        capsys.readouterr()
        code = main(words)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a real server with a memory backend, started as users start it."""
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
