"""Commands that other packages add to the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from taskqueue_cli import app as mounted
from taskqueue_core.errors import ConfigurationError
from tests.cli.conftest import Cli


def app_with(*points: EntryPoint) -> typer.Typer:
    """Return an app with one command of its own and the commands of these entry points."""
    app = typer.Typer()
    app.command(name="own")(lambda: print("own"))  # noqa: T201 - a command prints its output
    mounted.mount(app, points)
    return app


def test_a_package_adds_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package adds commands with the function ``add_to`` of its entry point (G10)."""

    def add_to(app: typer.Typer) -> None:
        app.command(name="theirs")(lambda: print("theirs"))  # noqa: T201 - a command prints its output

    monkeypatch.setitem(sys.modules, "their_commands", SimpleNamespace(add_to=add_to))
    app = app_with(EntryPoint("x", "their_commands", mounted.COMMANDS_GROUP))
    assert CliRunner().invoke(app, ["theirs"]).output == "theirs\n"
    assert CliRunner().invoke(app, ["own"]).output == "own\n"


def test_a_package_that_is_broken_spoils_no_other_command() -> None:
    """A package that cannot be imported does not affect other commands.

    Its own command reports the import error (G10).
    """
    app = app_with(EntryPoint("broken", "no_such_module_anywhere", mounted.COMMANDS_GROUP))
    assert CliRunner().invoke(app, ["own"]).output == "own\n"
    result = CliRunner().invoke(app, ["broken", "--any", "word"])
    assert isinstance(result.exception, ConfigurationError)
    assert "no_such_module_anywhere" in str(result.exception)


def test_the_pipeline_costs_other_commands_nothing() -> None:
    """Spark and its dependencies are not imported until a pipeline command runs (G10)."""
    script = "import sys, taskqueue_cli.app; print(*{'pyspark', 'hiredis', 'pyarrow', 'jinja2'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_the_help_is_fast() -> None:
    """U30: the help imports neither Rich nor pydantic nor this project's packages, which take several times as long."""
    script = (
        "import sys, taskqueue_cli; code = taskqueue_cli.main(['--help'])\n"
        "slow = ('rich', 'pydantic', 'pydantic_settings', 'httpx2', 'msgspec', 'taskqueue_core')\n"
        "sys.exit(f'{code} {[name for name in slow if name in sys.modules]}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr == "0 []\n"


def test_a_command_imports_no_declarations() -> None:
    """U6: a read-only command through a server does not import what declares and runs tasks, a fifth of its time."""
    script = (
        "import sys, taskqueue_cli\n"
        "code = taskqueue_cli.main(['stats', '--server', 'http://127.0.0.1:9'])\n"
        "own = [name for name in sys.modules if name.startswith('taskqueue_core.application')]\n"
        "sys.exit(f'{code} {own}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr.endswith("4 []\n"), done.stderr


@pytest.mark.parametrize("name", typer.main.get_command(mounted.app).list_commands(None))  # type: ignore[attr-defined]
def test_the_help_says_what_a_command_says(name: str, cli: Cli) -> None:
    """U30: every command of the list can be loaded, and its own help contains the text of the list."""
    short = mounted.short_helps()[name].rstrip(".")
    done = cli(name, "--help")
    assert done.code == 0
    if name in mounted.COMMANDS:
        assert short in " ".join(done.out.split())
    assert short


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("taskqueue can", "cancel"),
        ("taskqueue queue se", "set"),
        ("taskqueue result --wa", "--wait"),
    ],
)
def test_completion(words: str, completed: str) -> None:
    """U30: the shell completes commands, subcommands and options."""
    variables = {"_TASKQUEUE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "9"}
    variables["COMP_CWORD"] = str(len(words.split()) - 1)
    done = subprocess.run(
        [sys.executable, "-m", "taskqueue_cli"],
        capture_output=True, text=True, check=False, env=os.environ | variables,
    )  # fmt: skip
    assert done.stdout.split() == [completed]
