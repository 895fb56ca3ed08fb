"""Tests of the command ``taskqueue dispatch`` against a real server process and a simulated GPU server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from taskqueue_cli import main
from taskqueue_cli.output import console
from taskqueue_dispatch.cli import endpoints
from taskqueue_dispatch.models import ModelConfig
from tests.cli.conftest import Done
from tests.cli.processes import process

PATIENCE = 30.0
Cli = Callable[..., Done]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a server with ``taskqueue dispatch``, and yield its URL."""
    words = ("dispatch", "--port", "0", "--backend", "taskqueue_memory")
    with process(*words, stderr=None) as serving:
        assert serving.stdout is not None
        ready = json.loads(serving.stdout.readline())
        yield ready["url"]
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(20) == 0
        assert serving.stdout.read() == b""


@pytest.fixture(scope="module")
def gpu() -> Iterator[str]:
    """Start a simulated GPU server, and yield the URL of its endpoint."""
    words = [
        sys.executable,
        "-m",
        "taskqueue_dispatch.gpu_server",
        "--slots",
        "2",
        "--latency",
        "0.05",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield json.loads(running.stdout.readline())["url"]
        finally:
            running.kill()


@pytest.fixture
def cli(
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Cli:
    """Return a function that runs a command in this process and returns its exit code and output."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TASKQUEUE_SERVER_URL", server)
    monkeypatch.setattr(console, "width", 160)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        capsys.readouterr()
        code = main(("dispatch", *words))
        return Done(code, *capsys.readouterr())

    return run


def registered(cli: Cli, model: str, gpu: str) -> None:
    """Register the simulated GPU server for a model, and wait until it is healthy."""
    assert cli("register", model, "gpu-1", gpu, "--slots", "2").code == 0
    until = time.monotonic() + PATIENCE
    while not all(one["healthy"] for one in cli("endpoints", model, "--json").json):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_from_registration_to_result(cli: Cli, gpu: str) -> None:
    """After registration, a submitted job runs, and its result is shown as text and as JSON (C6, C12)."""
    assert "register MODEL SERVER URL" in cli("endpoints", "nobody").out
    registered(cli, "acme/zimg", gpu)
    done = cli("submit", "acme/zimg", '{"prompt": "a boat"}', "--wait", "30")
    assert done.code == 0, done.err
    assert done.json["server"] == "gpu"
    assert done.err.startswith("leased  ")
    told = cli("submit", "acme/zimg", "1", "--wait", "30", "--json").json
    assert (told["state"], told["result"]["job_id"]) == ("done", told["job_id"])
    shown = cli("job", told["job_id"])
    assert shown.code == 0
    assert "acme/zimg" in shown.out
    assert cli("job", told["job_id"], "--json").json["result"] == told["result"]
    table = cli("endpoints").out
    assert "acme/zimg" in table
    assert "ready" in table


def test_in_a_narrow_terminal(cli: Cli, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal with 80 columns, no word and no URL of the table of endpoints is broken (C12, B8)."""
    registered(cli, "narrow", gpu)
    monkeypatch.setattr(console, "width", 80)
    table = cli("endpoints", "narrow").out
    assert gpu in table
    assert "server" in table
    assert "endpoint" in table
    assert " free" in table


def test_a_rest_on_a_machine_whose_clock_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that rests for a minute by the server's clock is shown as resting, 5 h ahead of it (C12)."""
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 5 * 3600)
    info = endpoints._Endpoint(
        model="m", server="s", endpoint="http://s", slots=1, resting_until=now + 60,
        healthy=True, draining=False, removed=False,
        free=0, unassigned=0, assigned=0, detached=0, overdue=0,
    )  # fmt: skip
    assert endpoints._state(info).plain == "resting"


def test_watching(cli: Cli, gpu: str, server: str) -> None:
    """``--watch`` prints the table again when a slot or a state changes; Ctrl-C ends it with exit code 0 (B8)."""
    registered(cli, "watched", gpu)
    words = ("dispatch", "endpoints", "watched", "--watch", "--url", server)
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "taskqueue_cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        try:
            assert watching.stdout is not None
            for state in ("ready", "draining"):
                while state not in (line := watching.stdout.readline()):
                    assert line
                cli("drain", "watched", "gpu-1")
            watching.send_signal(signal.SIGINT)
            _, err = watching.communicate(timeout=PATIENCE)
        finally:
            watching.kill()
    assert (watching.returncode, err) == (0, "")


def test_submitting_again(cli: Cli, gpu: str) -> None:
    """Submitting the same key again returns the same job; the same key with another payload is refused (law 3)."""
    registered(cli, "again", gpu)
    words = ("submit", "again", "1", "--idempotency-key", "order-1", "--tenant", "acme")
    first, second = (cli(*words, "--priority", "7", "--json") for _ in range(2))
    assert first.code == second.code == 0
    assert first.json["job_id"] == second.json["job_id"]
    other = cli("submit", "again", "2", "--idempotency-key", "order-1", "--tenant", "acme")
    assert other.code == 1
    assert "order-1" not in other.err


def test_no_slots(cli: Cli) -> None:
    """Submitting to a model without endpoints fails at once with exit code 1 and the reason (B9, B13)."""
    done = cli("submit", "nobody-runs-it", "--json")
    assert done.code == 1
    assert done.json["error"]["code"] == "no_slots"
    assert "no endpoint with slots" in done.err


def test_a_job_that_fails(cli: Cli, gpu: str) -> None:
    """A failed job, and a job that does not end in time, give exit code 1 and an error code (C16, C26)."""
    assert cli("config", "ill", "--set", "max_retries=0").code == 0
    with subprocess.Popen(
        [sys.executable, "-m", "taskqueue_dispatch.gpu_server", "--mode", "fail"],
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            assert running.stdout is not None
            registered(cli, "ill", json.loads(running.stdout.readline())["url"])
            done = cli("submit", "ill", "--wait", "30", "--json")
        finally:
            running.kill()
    assert done.code == 1
    assert done.json["error"]["code"] == "job_ended"
    assert "max_retries_exceeded" in done.err
    registered(cli, "drained", gpu)
    assert cli("drain", "drained", "gpu-1").code == 0
    late = cli("submit", "drained", "--wait", "0.2", "--json")
    assert late.code == 1
    assert late.json["error"]["code"] in {"not_ended", "no_slots"}


def test_drain_undo_and_remove(cli: Cli, gpu: str) -> None:
    """An endpoint can be drained, used again and removed; an unknown endpoint is an error (C12)."""
    registered(cli, "rotating", gpu)
    drained = cli("drain", "rotating", "gpu-1", "--json")
    assert drained.json["draining"]
    assert "draining" in cli("endpoints", "rotating").out
    again = cli("drain", "rotating", "gpu-1", "--undo", "--json")
    assert (again.json["draining"], again.json["slots"]) == (False, 2)
    assert cli("remove", "rotating", "gpu-1").code == 0
    for words in (("drain", "rotating", "gpu-9"), ("remove", "rotating", "gpu-9")):
        done = cli(*words, "--json")
        assert done.code == 1
        assert done.json["error"]["code"] == "not_found"
    assert cli("drain", "rotating", "gpu-9", "--undo").code == 1


def test_config(cli: Cli) -> None:
    """Fields of a configuration can be shown, changed and reset; a wrong one changes nothing (C5, C13)."""
    defaults = ModelConfig().model_dump(mode="json")
    assert cli("config", "flux/1", "--json").json == defaults
    words = ("--set", "model_type=async", "--set", "poll_endpoint_template=/status/{id}")
    changed = cli("config", "flux/1", *words, "--set", 'weights={"acme":3}', "--json")
    assert changed.code == 0, changed.err
    more = cli("config", "flux/1", "--set", "poll_interval=3", "--json").json
    assert more == defaults | {
        "model_type": "async",
        "poll_endpoint_template": "/status/{id}",
        "weights": {"acme": 3},
        "poll_interval": 3.0,
    }
    for wrong in ("max_retries=-1", "max_retries=many", "no_such_field=1", "nothing"):
        done = cli("config", "flux/1", "--set", wrong)
        assert done.code == 2, wrong
        assert wrong.partition("=")[2] not in done.err.partition("allowed")[0] or "=" not in wrong
    assert cli("config", "flux/1", "--json").json == more
    assert "poll interval" in cli("config", "flux/1").out.replace("_", " ")
    assert cli("config", "flux/1", "--reset", "--json").json == defaults


def test_wrong_usage(cli: Cli, tmp_path: Path) -> None:
    """Wrong usage exits with code 2, and an unknown job with code 1."""
    assert cli("job", "0123456789-nobody").code == 1
    assert cli("job", "").code == 2
    assert cli("submit", "m", "not json").code == 2
    assert cli("submit", "m", f"@{tmp_path}/missing").code == 2
    assert cli("endpoints", "--watch", "--json").code == 2
    assert cli("config", "m", "--reset", "--set", "max_retries=1").code == 2
    assert cli("--port", "1", "endpoints").code == 2
    assert cli("demo", "--jobs", "60", "--seconds", "5").code == 2
    refused = cli("register", "m", "gpu-1", "http://8.8.8.8/run", "--json")
    assert refused.code == 2
    assert "8.8.8.8" not in refused.out


def test_a_demo_without_its_extra() -> None:
    """If the packages of the demo are missing, the error says how to install them."""
    program = "import sys; sys.modules['standardwebhooks'] = None\n"
    program += "from taskqueue_cli import main; sys.exit(main(['dispatch', 'demo']))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "pip install 'taskqueue-backends[dispatch]'" in done.stderr


def test_a_server_without_a_dispatcher(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without a dispatcher and an unreachable server give different errors.

    Both say how to start a dispatcher.
    """
    with process("serve", "--port", "0", "--backend", "taskqueue_memory", stderr=None) as plain:
        assert plain.stdout is not None
        url = json.loads(plain.stdout.readline())["url"]
        done = cli("endpoints", "--url", url)
    assert done.code == 2
    assert "taskqueue dispatch" in done.err
    monkeypatch.setenv("TASKQUEUE_SERVER_URL", "http://127.0.0.1:1")
    nobody = cli("endpoints")
    assert nobody.code == 4
    assert "start one with 'taskqueue dispatch'" in nobody.err
    gone: Any = cli("submit", "m", "--json")
    assert gone.code == 4
    assert "--idempotency-key" in gone.err
