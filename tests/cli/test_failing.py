"""Errors of commands: one line on stderr, an exit code, and no traceback."""

import builtins
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from taskqueue_cli import main
from taskqueue_cli.backends import PROBE_AFTER, PROBE_SECONDS
from taskqueue_cli.output import exit_code
from taskqueue_core.errors import (
    BackendUnavailable,
    CapabilityMissing,
    IdConflict,
    InvalidInput,
    PublishUnconfirmed,
    TaskQueueError,
)
from taskqueue_worker import WorkerQuarantined, WorkerRefused
from tests.cli.conftest import Cli
from tests.cli.shared import Shared


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TaskQueueError("x"), 1),
        (IdConflict("x"), 1),
        (InvalidInput("a", "b", "c"), 2),
        (CapabilityMissing("x"), 2),
        (WorkerQuarantined("x"), 3),
        (WorkerRefused("x"), 4),
        (BackendUnavailable("x"), 4),
        (PublishUnconfirmed("x"), 4),
    ],
)
def test_exit_codes(error: TaskQueueError, code: int) -> None:
    """D6: the exit code distinguishes a quarantined worker, an outage, a refusal and wrong input."""
    assert exit_code(error) == code


def test_a_server_out_of_reach_is_4(cli: Cli) -> None:
    """If the server cannot be reached, the command exits with 4 and one line that says what to do."""
    done = cli("stats", "--server", "http://127.0.0.1:1", "--json")
    assert done.code == 4
    assert done.json["error"]["code"] == "backend_unavailable"
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "taskqueue serve" in done.err


def test_a_backend_of_one_process_goes_through_the_server(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the configured backend exists in one process only, commands connect to the server instead."""
    monkeypatch.setenv("TASKQUEUE_BACKEND", "taskqueue_memory")
    assert cli("stats").code == 4
    assert "share" in cli("stats", "--help").out


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TASKQUEUE_BACKEND", "no_such_module", "no_such_module"),
        ("TASKQUEUE_PORT", "many", "TASKQUEUE_PORT"),
    ],
)
def test_wrong_settings_are_2(
    name: str, value: str, said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G3: a backend that cannot be found, or another wrong setting, exits with 2 and is named."""
    monkeypatch.setenv(name, value)
    done = cli("stats")
    assert done.code == 2
    assert said in done.err


def test_a_bug_is_one_line_too(cli: Cli, store: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception is reported in one line with its location, and without a traceback."""

    async def broken() -> Any:
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr(store.control, "queues", broken)
    done = cli("stats", "--json")
    assert done.code == 1
    assert done.json["error"]["code"] == "internal"
    assert done.err.startswith("error: unexpected ZeroDivisionError: oh no (")
    assert done.err.count("\n") == 1


def test_an_interrupt_is_130(cli: Cli, store: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C exits with 130 and prints nothing."""

    async def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.control, "queues", interrupted)
    done = cli("stats")
    assert (done.code, done.err) == (130, "")


def test_a_reader_that_leaves_is_no_bug() -> None:
    """If the reader of the output exits, as in `taskqueue ... | head`, no traceback is printed."""
    read, write = os.pipe()
    os.close(read)
    try:
        words = [sys.executable, "-m", "taskqueue_cli", "version", "--json"]
        done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert done.returncode == 1
    assert done.stderr == b""


def test_without_the_extra_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the libraries of the command line, the command names the extra to install."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("taskqueue_cli.app"):
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["version"]) == 2
    assert "taskqueue-backends[cli]" in capsys.readouterr().err


def test_version_and_help(cli: Cli) -> None:
    """Version and help work without settings, and the help lists the exit codes."""
    told = cli("version", "--json").json
    assert set(told) == {"version", "python", "backends"}
    assert told["python"] in cli("version").out
    assert cli("--version").out == cli("version").out
    assert "3 too many attempts failed in a row" in " ".join(cli("--help").out.split())
    assert cli().code == 2
    assert cli("publish", "--nonsense").code == 2


def test_settings_of_the_current_folder_are_read(cli: Cli) -> None:
    """Settings are read from taskqueue.toml in the current folder; environment variables override them."""
    Path("taskqueue.toml").write_text('server_url = "http://127.0.0.1:2"\nbackend = "nowhere"\n')
    assert cli("stats").code == 0


def test_a_worker_without_handlers_prints_one_value(cli: Cli) -> None:
    """If a worker has no handlers, the error is the only JSON value on stdout."""
    Path("idle_worker.py").write_text("from taskqueue_worker import Worker\n\nworker = Worker()\n")
    done = cli("worker", "idle_worker:worker", "--json")
    assert done.code == 2
    assert "has no handlers" in done.json["error"]["detail"]


def test_a_setting_that_excludes_another_is_an_input_error(
    cli: Cli, store: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capacity limit for a sharded queue is refused with the reason."""
    monkeypatch.setenv("TASKQUEUE_SHARDING", "true")
    assert store is not None
    assert cli("queue", "set", "k", "--shards", "4").code == 0
    done = cli("queue", "set", "k", "--capacity", "5", "--json")
    assert done.code == 2
    assert "a queue with the setting capacity cannot have shards" in done.json["error"]["detail"]


@pytest.mark.parametrize(
    ("words", "backend", "named"),
    [
        (["--server", "URL"], "tests.cli.shared", "--server"),
        ([], "server", "TASKQUEUE_SERVER_URL"),
        ([], "redis", "TASKQUEUE_REDIS_URL"),
    ],
)
@pytest.mark.parametrize("silent", [False, True])
def test_an_outage_names_the_setting_soon(
    words: list[str],
    backend: str,
    named: str,
    silent: bool,  # noqa: FBT001 - a parameter of the test
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """U29: an unavailable store or server is reported within 2 s, with the setting that contains its address."""
    assert PROBE_AFTER + PROBE_SECONDS < 2
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and never responds
        port = listener.getsockname()[1] if silent else 1
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("TASKQUEUE_BACKEND", backend)
        monkeypatch.setenv("TASKQUEUE_SERVER_URL", url)
        monkeypatch.setenv("TASKQUEUE_REDIS_URL", f"redis://127.0.0.1:{port}")
        done = cli("stats", *(url if word == "URL" else word for word in words))
        assert (done.code, named in done.err) == (4, True), done.err


def test_a_server_on_windows_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """U30: on Windows, serve is a configuration error that says where a server can run."""
    monkeypatch.setattr("taskqueue_cli.commands.serve.os.name", "nt")
    done = cli("serve", "--port", "0")
    monkeypatch.undo()
    assert (done.code, "not supported on Windows" in done.err) == (2, True)
