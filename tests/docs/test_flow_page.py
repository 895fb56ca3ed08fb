"""The page about limits: its commands print what it shows, its code runs, and its table is what the code has."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.cli import main
from taskqueue_core.flow import RateLimit
from taskqueue_core.tasks import Refusal
from tests.ports import free_port
from tests.redis.engines import lacking

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flow.md").read_text()
PATIENCE = 20.0
OPERATOR, HTTP = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(CODE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a block with what it prints, as far as the page shows that."""
    return re.findall(r"^\$ (.+)\n((?:(?!\$ ).+\n)*)", block, re.MULTILINE)


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's server, on a port of its own, with commands in this process that find it."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    port = str(free_port())
    monkeypatch.setenv("TASKQUEUE_PORT", port)
    monkeypatch.setenv("TASKQUEUE_SERVER_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (command, _) = commands(OPERATOR)[0]
    _, *words = shlex.split(command.removesuffix("&"))
    server = subprocess.Popen(
        [sys.executable, "-m", "taskqueue_core.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline()
    yield port
    server.terminate()
    server.communicate(timeout=PATIENCE)


def test_the_commands_and_the_code(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B13: each command does what the page shows; one that is shown to fail fails, and no other."""
    if not shutil.which("curl"):
        lacking("there is no curl")
    for command, shown in commands(OPERATOR)[1:]:
        capsys.readouterr()
        code = main(shlex.split(command)[1:])
        out, err = capsys.readouterr()
        assert code == (1 if shown.startswith("error: ") else 0), err
        assert (err if code else out).split() == shown.split() or (out and not shown), command
    told = [json.loads(run(*shlex.split(f"{one} -sS"), port=port)) for one, _ in commands(HTTP)]
    assert [one["version"] for one in told] == [6, 7, 8, 9, 9, 10]
    assert [one["paused"] for one in told] == [True, False, False, False, False, False]
    assert [one["intake_paused"] for one in told] == [False, False, True, False, False, False]
    assert (told[3]["capacity"], told[3]["rate_limit"]["max_tokens"]) == (1000, 100)
    assert told[5] == QueueSettings(version=10).model_dump(mode="json")
    assert run(sys.executable, "-c", CODE) == "accepted\n"
    main(["queue", "pause", "resize", "--intake"])
    impatient = CODE.replace("wait=30", "wait=0.01")
    assert run(sys.executable, "-c", impatient).startswith("intake_paused None ")


def run(*words: str, port: str = "") -> str:
    """Run a program; return what it prints."""
    here = [word.replace(":8420", f":{port}") for word in words]
    done = subprocess.run(here, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tables() -> None:
    """Every limit and every reason of a refusal is on the page."""
    limits = [name for name in QueueSettings().model_dump() if f"| `{name}` |" in PAGE]
    rate = RateLimit(max_tokens=1)
    limited = QueueSettings(
        capacity=1, max_inflight=1, rate_limit=rate, paused=True, intake_paused=True
    )
    assert limits == list(limited.flow)
    (codes,) = re.findall(r"^\| `code` \|(.*)\|$", PAGE, re.MULTILINE)
    assert [code.strip(" `") for code in codes.split("|")] == list(Refusal)
