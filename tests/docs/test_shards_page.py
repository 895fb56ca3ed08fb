"""The page about shards: its command and code run, and its figures agree with the code."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from taskqueue_cli import main
from taskqueue_core.capabilities.settings import _WHOLE
from taskqueue_core.limits import LIMITS
from taskqueue_core.sharding.generations import LONGEST
from tests.cli.shared import renew
from tests.docs.programs import blocks, python

PAGE = (Path(__file__).parents[2] / "docs" / "shards.md").read_text()


def test_its_code(tmp_path: Path) -> None:
    """A18, A19: the context of a task says whether its shard has changed, which happens rarely."""
    (code,) = blocks(PAGE, "python")
    assert 7 <= python(code, tmp_path).count("another shard") <= 40


def test_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A16: the command creates the number of shards that it sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.setenv("TASKQUEUE_BACKEND", "tests.cli.shared")
    monkeypatch.setenv("TASKQUEUE_SHARDING", "true")
    store = renew()
    (command,) = re.findall(r"^\$ taskqueue (.+)$", PAGE, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    names = asyncio.run(store.control.queues())
    assert len([name for name in names if name.startswith("frames:s")]) == 8


def test_its_figures() -> None:
    """The page names the settings that a sharded queue refuses, and the maximum length of its name."""
    for name in _WHOLE:
        assert name in PAGE or name.startswith(("tenant", "weights", "paused_tenants")), name
    assert f"at most {LIMITS.name - LONGEST} characters" in PAGE
