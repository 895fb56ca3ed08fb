"""The page about queue limits: its commands and code run as shown, and its tables agree with the code."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskqueue_cli import main
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.config import Settings
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Refusal
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from taskqueue_server.problems import refusal_status
from tests.binaries import curl
from tests.docs.programs import blocks, python, run
from tests.server.in_thread import in_thread

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flow.md").read_text()
OPERATOR, HTTP, *ORDER = blocks(PAGE, "console")
CODE, CAPACITY = blocks(PAGE, "python")


def commands(block: str) -> list[tuple[str, str]]:
    """Return each command of a block, with the output that the page shows for it."""
    return re.findall(r"^\$ (.+)\n((?:(?!\$ ).+\n)*)", block, re.MULTILINE)


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a server like that of `taskqueue serve`, for commands in this process; yield its port."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    assert commands(OPERATOR)[0] == ("taskqueue serve &", "")
    with in_thread(ServerProcess(MemoryBackend(), Settings(port=0))) as server:
        monkeypatch.setenv("TASKQUEUE_SERVER_URL", server.url)
        yield server.url.rpartition(":")[2]


def test_the_commands_and_the_code(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B13: each command prints what the page shows, and fails only if the page shows an error."""
    curl()
    follow(commands(OPERATOR)[1:], capsys)
    asked = [f"{one} -sS".replace(":8420", f":{port}") for one, _ in commands(HTTP)]
    told = [json.loads(run(*shlex.split(one))) for one in asked]
    assert [one["version"] for one in told] == [6, 7, 8, 9, 9, 10]
    assert [one["paused"] for one in told] == [True, False, False, False, False, False]
    assert [one["intake_paused"] for one in told] == [False, False, True, False, False, False]
    assert (told[3]["capacity"], told[3]["rate_limit"]["max_tokens"]) == (1000, 100)
    assert told[5] == QueueSettings(version=10).model_dump(mode="json")
    assert python(CODE) == "accepted\n"
    main(["queue", "pause", "resize", "--intake"])
    impatient = CODE.replace("wait=30", "wait=0.01")
    assert python(impatient).startswith("intake_paused None ")


def test_order_and_copies(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B12, D9, C18: the commands about order, hung tasks and copies print what the page shows."""
    assert port
    follow([one for block in ORDER for one in commands(block)], capsys)
    main(["stats", "mail", "audit", "orders", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [one["ledger"]["published"] for one in told] == [1, 1, 1]


def test_a_capacity_that_follows(port: str) -> None:
    """B4: the program about a changing capacity prints the capacities that the page names."""
    assert port
    first, second = re.findall(r"prints `(.*?)` and `(.*?)`", PAGE)[0]
    assert python(CAPACITY) == f"{first}\n{second}\n"


def follow(shown: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    """Run commands and check that each prints what the page shows, if the page shows any output."""
    for command, expected in shown:
        capsys.readouterr()
        code = main(shlex.split(command)[1:])
        out, err = capsys.readouterr()
        assert code == (1 if expected.startswith("error: ") else 0), err
        assert (err if code else out).split() == expected.split() or (out and not expected), command


def test_the_tables() -> None:
    """The tables contain every limit, every reason for a refusal, and its HTTP status."""
    limits = [name for name in QueueSettings().model_dump() if f"| `{name}` |" in PAGE]
    rate = RateLimit(max_tokens=1)
    limited = QueueSettings(
        capacity=1,
        max_inflight=1,
        rate_limit=rate,
        paused=True,
        intake_paused=True,
        moved_to="elsewhere",
        max_processing_time=1,
        timeout=1,
        order=Order.FAIR,
        weights={"a": 1},
        tenant_capacity=1,
        tenant_max_inflight=1,
        tenant_rate_limit=rate,
        paused_tenants=("a",),
        floor_share=0.1,
    )
    assert limits == [*limited.flow, *limited.ordering]
    (codes,) = re.findall(r"^\| `code` \|(.*)\|$", PAGE, re.MULTILINE)
    assert [code.strip(" `") for code in codes.split("|")] == list(Refusal)
    (statuses,) = re.findall(r"^\| over HTTP \|(.*)\|$", PAGE, re.MULTILINE)
    assert [int(one) for one in statuses.split("|")] == [refusal_status(one) for one in Refusal]
