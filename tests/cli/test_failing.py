"""What becomes of errors: one line, an exit code, never a trace."""

import builtins
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from taskqueue_cli import main
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
    """D6: a script can tell a quarantined worker from an outage, a refusal and a mistake."""
    assert exit_code(error) == code


def test_a_server_out_of_reach_is_4(cli: Cli) -> None:
    """One red line says what to do about it."""
    done = cli("stats", "--server", "http://127.0.0.1:1", "--json")
    assert done.code == 4
    assert done.told["error"]["code"] == "backend_unavailable"
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "taskqueue serve" in done.err


def test_a_backend_of_one_process_goes_through_the_server(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory backend of one's own would always be empty: the server is asked instead."""
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
    """G3: a backend that cannot be found, and any other wrong setting, is named."""
    monkeypatch.setenv(name, value)
    done = cli("stats")
    assert done.code == 2
    assert said in done.err


def test_a_bug_is_one_line_too(cli: Cli, store: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong, there is no trace on the screen, but the place is named."""

    async def broken() -> Any:
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr(store.control, "queues", broken)
    done = cli("stats", "--json")
    assert done.code == 1
    assert done.told["error"]["code"] == "internal"
    assert done.err.startswith("error: unexpected ZeroDivisionError: oh no (")
    assert done.err.count("\n") == 1


def test_an_interrupt_is_130(cli: Cli, store: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no failure of ours, and says nothing."""

    async def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.control, "queues", interrupted)
    done = cli("stats")
    assert (done.code, done.err) == (130, "")


def test_a_reader_that_leaves_is_no_bug() -> None:
    """`taskqueue ... | head` does not end in a trace."""
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
    """The command exists without its libraries, and asks for them."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("taskqueue_cli.app"):
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["version"]) == 2
    assert "taskqueue-backends[cli]" in capsys.readouterr().err


def test_version_and_help(cli: Cli) -> None:
    """They work without settings, and help lists the exit codes."""
    told = cli("version", "--json").told
    assert set(told) == {"version", "python", "backends"}
    assert told["python"] in cli("version").out
    assert cli("--version").out == cli("version").out
    assert "3 worker quarantined" in " ".join(cli("--help").out.split())
    assert cli().code == 2
    assert cli("publish", "--nonsense").code == 2


def test_settings_of_the_current_folder_are_read(cli: Cli) -> None:
    """A taskqueue.toml beside the work is enough; the environment wins over it."""
    Path("taskqueue.toml").write_text('server_url = "http://127.0.0.1:2"\nbackend = "nowhere"\n')
    assert cli("stats").code == 0


def test_a_worker_without_handlers_prints_one_value(cli: Cli) -> None:
    """With --json the error is the only JSON value, since nothing was started."""
    Path("idle_worker.py").write_text("from taskqueue_worker import Worker\n\nworker = Worker()\n")
    done = cli("worker", "idle_worker:worker", "--json")
    assert done.code == 2
    assert "has no handlers" in done.told["error"]["detail"]


def test_a_setting_that_excludes_another_is_an_input_error(
    cli: Cli, store: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on a sharded queue is refused with the reason."""
    monkeypatch.setenv("TASKQUEUE_SHARDING", "true")
    assert store is not None
    assert cli("queue", "set", "k", "--shards", "4").code == 0
    done = cli("queue", "set", "k", "--capacity", "5", "--json")
    assert done.code == 2
    assert "a queue with capacity cannot have shards" in done.told["error"]["detail"]
