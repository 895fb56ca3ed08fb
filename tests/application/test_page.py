"""The examples of docs/tasks.md run as written, and its lists match the code."""

from __future__ import annotations

import re
from pathlib import Path

from taskqueue_core.application.call import CallOptions
from taskqueue_core.queue import PublishOptions
from tests.docs.programs import blocks, python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tasks.md").read_text()


def test_examples(tmp_path: Path) -> None:
    """U1, U2, U6: the modules of tasks can be imported, and both programs publish."""
    folder = tmp_path / "shop"
    folder.mkdir()
    programs = []
    for text in blocks(PAGE, "python"):
        if path := re.match(r"# (shop/\w+\.py)\n", text):
            (tmp_path / path[1]).write_text(text)
        else:
            programs.append(text)
    assert programs
    for text in programs:
        assert python(text, tmp_path)
    assert python("from shop.reports import report; print(report(4))", tmp_path) == "6\n"


def test_options_are_listed() -> None:
    """U1: the page lists every option of `using`."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith("- `using(...)`"))
    options = CallOptions.__annotations__ | PublishOptions.__annotations__
    assert all(f"`{name}`" in line for name in options)
