"""The page about reconciling: its program repairs missing publishes through a real server."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskqueue_core import Reconciled
from taskqueue_core.config import Settings
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from tests.docs.programs import blocks, python
from tests.server.in_thread import in_thread

PAGE = (Path(__file__).parents[2] / "docs" / "reconciling.md").read_text()
(CODE,) = blocks(PAGE, "python")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Run a server and return environment variables with its URL."""
    told = {name: text for name, text in os.environ.items() if not name.startswith("TASKQUEUE_")}
    with in_thread(ServerProcess(MemoryBackend(), Settings(port=0))) as server:
        yield told | {"TASKQUEUE_SERVER_URL": server.url}


def test_the_program(tmp_path: Path, environment: dict[str, str]) -> None:
    """D1: the program publishes each row that is old enough and not done, and only once in several runs."""
    assert python(CODE, tmp_path, environment) == "0 0 0 0 0\n"
    old, now = time.time() - 61, time.time()
    rows = [("a", old, False), ("b", old, False), ("done", old, True), ("new", now, False)]
    with sqlite3.connect(tmp_path / "shop.db") as database:
        database.executemany(
            "INSERT INTO orders VALUES (?, 'cat.png', ?, ?)",
            [(one, at, is_) for one, at, is_ in rows],
        )
    database.close()
    assert python(CODE, tmp_path, environment) == "2 2 2 0 0\n"
    assert python(CODE, tmp_path, environment) == "2 0 0 0 0\n"


def test_the_table() -> None:
    """The table explains each number of the report, in the order in which the program prints them."""
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(Reconciled.__struct_fields__)
    assert re.findall(r"report\.(\w+)", CODE) == list(Reconciled.__struct_fields__)
