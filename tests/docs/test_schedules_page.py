"""The page about schedules: its commands and code run as shown, and its lists agree with the code."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core import Schedule
from taskqueue_core.config import Settings
from taskqueue_core.queue_schedules import QueueSchedules
from taskqueue_core.schedules import SkipReason
from taskqueue_core.schedules.when import _NAMES
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from tests.docs.programs import blocks, python
from tests.docs.test_flow_page import commands, follow
from tests.modules import own_package
from tests.server.in_thread import in_thread

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "schedules.md").read_text()
MODULE, PUT, TEST = blocks(PAGE, "python")
APPLY, COMMANDS = blocks(PAGE, "console")


@pytest.fixture
def _shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the module of the page, and run a server like that of `taskqueue serve`."""
    for name in os.environ:
        if name.startswith("TASKQUEUE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "tasks.py").write_text(MODULE)
    served = in_thread(ServerProcess(MemoryBackend(), Settings(port=0)))
    with own_package("shop"), served as server:
        monkeypatch.setenv("TASKQUEUE_SERVER_URL", server.url)
        yield


@pytest.mark.usefixtures("_shop")
def test_the_commands_and_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    """U13: each command prints what the page shows; the program prints what the page says."""
    assert commands(APPLY)[0] == ("taskqueue serve &", "")
    follow(commands(APPLY)[1:], capsys)
    expected = re.findall(r"It prints `(.*?)` and `(.*?)`", PAGE)[0]
    assert python(PUT).splitlines() == [*expected]
    follow(commands(COMMANDS), capsys)


@pytest.mark.usefixtures("_shop")
def test_the_test_of_the_page() -> None:
    """U11, U13: the example of a test passes."""
    names: dict[str, Any] = {}
    exec(compile(TEST, "page", "exec"), names)  # noqa: S102 - the page's own example
    asyncio.run(names["test_the_night_of_the_change"]())


def test_the_lists_agree_with_the_code() -> None:
    """U13: the page names each field of a schedule, each method, each reason for a skip and each name of a time."""
    for field in Schedule.__struct_fields__[3:]:
        assert f"`{field}`" in PAGE, field
    for name, _ in inspect.getmembers(QueueSchedules, inspect.isfunction):
        if not name.startswith("_") and name not in {"run", "demand"}:
            assert f"`{name}`" in PAGE, name
    for reason in set(SkipReason) - {SkipReason.REFUSED}:  # recorded as the code of the refusal
        assert f"`{reason.value}`" in PAGE, reason
    for name in _NAMES.keys() - {"@annually", "@midnight"}:
        assert f"`{name}`" in PAGE, name
