"""Loading the worker that is named on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_worker import load_worker

ONE = """
from taskqueue_worker import Worker
worker = Worker(url="http://h")
alias = worker
other = 5
"""
TWO = ONE + "second = Worker(url='http://h')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder that contains some modules with workers."""
    for name, text in {
        "tq_one": ONE,
        "tq_two": TWO,
        "tq_none": "",
        "tq_bad": "1/0",
        "tq_needs": "import tq_missing",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_workers_are_found() -> None:
    """A worker is found by its attribute, or as the only worker of a module."""
    assert load_worker("tq_one:worker") is load_worker("tq_one")
    assert load_worker("tq_two:second") is not load_worker("tq_two:worker")


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("", "use 'package.module:attr'"),
        ("a b", "names no registry of tasks or worker"),
        ("../tq_one", "names no registry of tasks or worker"),
        (":worker", "names no registry of tasks or worker"),
        ("tq_one:a..b", "names no registry of tasks or worker"),
        ("tq_absent", "module 'tq_absent' not found"),
        ("tq_one.part", "module 'tq_one.part' not found|is not a package"),
        ("tq_needs", "importing 'tq_needs' failed: ModuleNotFoundError"),
        ("tq_bad", "importing 'tq_bad' failed: ZeroDivisionError"),
        ("tq_none", "has no worker"),
        ("tq_two", r"has 2 workers \(in this module: alias, second, worker\)"),
        ("tq_two:third", r"has no 'third' \(in this module: alias, second, worker\)"),
        (
            "tq_one:other",
            r"is a int, not a registry of tasks or a worker \(in this module: alias, worker\)",
        ),
    ],
)
def test_what_is_wrong_is_said(word: str, fault: str) -> None:
    """Each invalid name raises an error that explains what is wrong."""
    with pytest.raises(ConfigurationError, match=fault):
        load_worker(word)
