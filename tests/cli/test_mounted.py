"""Commands that other packages bring."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from taskqueue_cli import app as mounted
from taskqueue_core.errors import ConfigurationError


def app_with(*points: EntryPoint) -> typer.Typer:
    """A program with one command of its own, and these."""
    app = typer.Typer()
    app.command(name="own")(lambda: print("own"))  # noqa: T201 - it is what the command does
    mounted.mount(app, points)
    return app


def test_a_package_adds_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an entry point leads to is asked to add its commands (G10)."""

    def add_to(app: typer.Typer) -> None:
        app.command(name="theirs")(lambda: print("theirs"))  # noqa: T201 - as above

    monkeypatch.setitem(sys.modules, "their_commands", SimpleNamespace(add_to=add_to))
    app = app_with(EntryPoint("x", "their_commands", mounted.COMMANDS_GROUP))
    assert CliRunner().invoke(app, ["theirs"]).output == "theirs\n"
    assert CliRunner().invoke(app, ["own"]).output == "own\n"


def test_a_package_that_is_broken_spoils_no_other_command() -> None:
    """Its command says why it cannot be loaded, whatever it is given (G10)."""
    app = app_with(EntryPoint("broken", "no_such_module_anywhere", mounted.COMMANDS_GROUP))
    assert CliRunner().invoke(app, ["own"]).output == "own\n"
    result = CliRunner().invoke(app, ["broken", "--any", "word"])
    assert isinstance(result.exception, ConfigurationError)
    assert "no_such_module_anywhere" in str(result.exception)


def test_the_pipeline_costs_other_commands_nothing() -> None:
    """Neither Spark nor what it brings is imported before a command of the pipeline runs (G10)."""
    script = "import sys, taskqueue_cli.app; print(*{'pyspark', 'hiredis', 'pyarrow', 'jinja2'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
