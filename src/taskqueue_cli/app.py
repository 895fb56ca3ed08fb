"""The Typer application with all commands, and the conversion of exceptions to exit codes."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import typer
import typer.core
import typer.main

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

COMMANDS_GROUP = "taskqueue.commands"
_INTERRUPTED = 130


class Commands(Protocol):
    """The interface of the objects that packages register as entry points of the group ``taskqueue.commands``.

    The entry point has the name of the command. The first line of its module's docstring is the command's short help;
    it is read without importing the module.
    """

    def add_to(self, app: typer.Typer) -> None:
        """Add the package's commands to ``app``."""


def mount(app: typer.Typer, points: Iterable[EntryPoint] | None = None) -> None:
    """Add the commands of other installed packages, sorted by the names of their entry points.

    If an entry point cannot be loaded, a command of the same name is added that reports the error when it is called.
    """
    for point in sorted(entry_points(group=COMMANDS_GROUP) if points is None else points):
        try:
            cast("Commands", point.load()).add_to(app)
        except Exception as error:  # noqa: BLE001 - a broken package may raise any exception
            _add_broken(app, point.name, f"{type(error).__name__}: {error}")


def _add_broken(app: typer.Typer, name: str, reason: str) -> None:
    def broken() -> None:
        from taskqueue_core.errors import ConfigurationError  # noqa: PLC0415 - slow to import

        raise ConfigurationError(f"the command {name} cannot be loaded: {reason}")

    app.command(
        name=name,
        help="Cannot be loaded.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(broken)


COMMANDS = {
    "serve": "Serve a backend to workers and publishers, until Ctrl-C or SIGTERM.",
    "worker": "Run a worker until Ctrl-C or SIGTERM; a second signal releases the running tasks at once.",
    "publish": "Publish one task, or all tasks of a file with --batch.",
    "status": "Show the status of one task.",
    "result": "Print the result of one task, as JSON.",
    "reschedule": "Let one blocked, waiting or scheduled task run at another time.",
    "cancel": "Cancel one task.",
    "purge": "Cancel all blocked, waiting and scheduled tasks of a queue.",
    "erase": "Erase the tasks of a queue that have a tag, and all that is stored of them.",
    "stats": "Show the ledgers of all queues, or of the given queues.",
    "workers": "Show the connected workers, with their queues and their number of running tasks.",
    "queue": "Show and change the limits and the delivery order of queues; pause, resume and bind queues.",
    "tenant": "Pause and resume the tenants of a queue.",
    "schedule": "Put, show, pause, run and delete schedules, which publish tasks at given times.",
    "workflow": "List, show and cancel workflows, whose steps wait for one another.",
    "dlq": "List, inspect, redrive and discard dead letters.",
    "audit": "Show what operators have done, newest first.",
    "apply": "Write what tasks declare into the store: settings of their queues, and schedules.",
    "tasks": "List the tasks of a queue, or show those that a registry declares.",
    "token": "Create, list and revoke access tokens of a server.",
    "migrate": "Migrate from one backend to another without downtime.",
    "demo": "Run a real job: hash and compress the files under PATH and count their lines, with deliberate failures.",
    "version": "Show the version, the Python version and the installed backends.",
}
"""the commands of this package with their short help, which is shown without importing them"""
_MODULES = {
    "queue": "queues",
    "tenant": "tenants",
    "dlq": "dead_letters",
    "schedule": "schedules",
    "workflow": "workflows",
    "result": "status",
    "reschedule": "status",
    "cancel": "status",
    "purge": "status",
    "workers": "stats",
}
_FUNCTIONS = {"serve": "run", "worker": "run", "demo": "run", "version": "show", "stats": "show"}
_STORE = {
    "publish",
    "stats",
    "status",
    "result",
    "reschedule",
    "cancel",
    "purge",
    "erase",
    "workers",
    "audit",
    "apply",
}
"""commands whose help says which backend they use"""


class LazyGroup(typer.core.TyperGroup):
    """The group of all commands. It imports a command when the command is called, because imports take long."""

    def list_commands(self, ctx: Context) -> list[str]:  # noqa: ARG002 - the signature of the base class
        return list(short_helps())

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:  # noqa: ARG002 - see above
        if cmd_name not in self.commands:
            self.commands.update(_build(cmd_name))
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:  # noqa: ARG002 - see above
        with formatter.section("Commands"):
            formatter.write_dl(list(short_helps().items()))

    def shell_complete(self, ctx: Context, incomplete: str) -> list[Any]:
        from typer._click.shell_completion import CompletionItem  # noqa: PLC0415 - for completion only

        found = [
            CompletionItem(name, help=text)
            for name, text in short_helps().items()
            if name.startswith(incomplete)
        ]
        return [*found, *typer.core.TyperCommand.shell_complete(cast("Any", self), ctx, incomplete)]


def short_helps() -> dict[str, str]:
    """Return the names of all commands with their short help."""
    mounted = {point.name: _summary(point.module) for point in entry_points(group=COMMANDS_GROUP)}
    return COMMANDS | dict(sorted(mounted.items()))


def _summary(module: str) -> str:
    """Return the first line of a module's docstring without importing it; empty if there is no source file."""
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, *rest)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
    return ""


def _build(name: str) -> dict[str, Command]:
    """Import the command ``name``, and return it with those that its package adds."""
    built = typer.Typer(rich_markup_mode=None, add_completion=False)
    built.callback()(lambda: None)  # so that Typer creates a group even for one command
    if name in COMMANDS:
        from taskqueue_cli.backends import BACKEND_HELP, ServeCommand  # noqa: PLC0415 - slow to import
        from taskqueue_cli.output import paragraphs  # noqa: PLC0415 - slow to import

        module = import_module(f"taskqueue_cli.commands.{_MODULES.get(name, name)}")
        command = getattr(module, _FUNCTIONS.get(name, name))
        if isinstance(command, typer.Typer):
            built.add_typer(command)
        else:
            notes = [BACKEND_HELP] if name in _STORE else []
            if name == "stats":
                notes[0] += " Exits with 1 if a ledger does not balance."
            cls = ServeCommand if name == "serve" else None
            text = "\n\n".join((paragraphs(command.__doc__), *notes))
            built.command(name, help=text, cls=cls)(command)
    else:
        points = entry_points(group=COMMANDS_GROUP)
        mount(built, [point for point in points if point.name == name] or points)
    group = typer.main.get_group(built)
    return dict(group.commands)


def _print_version(requested: bool) -> None:  # noqa: FBT001 - typer passes the value by position
    if requested:
        from taskqueue_cli.commands.version import show  # noqa: PLC0415 - slow to import

        show()
        raise typer.Exit


def _options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Declare the options of ``taskqueue`` itself, which are given before a command."""


app = typer.Typer(
    name="taskqueue",
    cls=LazyGroup,
    help="A task queue with pluggable backends: run a server, run workers, publish tasks, inspect queues.",
    epilog=(
        "Exit codes: 0 success; 1 failed; 2 wrong usage, input or configuration; 3 too many attempts failed in a row; "
        "4 store or server unavailable, or access refused; 130 interrupted. Settings come from "
        "TASKQUEUE_... variables, .env and taskqueue.toml."
    ),
    no_args_is_help=True,
    rich_markup_mode=None,  # Rich takes longer to import than the help may take
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(_options)


@cache  # creating the click command of the application takes longer than running most commands
def _command() -> Callable[..., object]:
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        _command()(args=list(arguments), prog_name="taskqueue")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The program that reads stdout, for example `head`, closed the pipe. The interpreter flushes stdout when it
        # exits, which would raise the error again, so redirect stdout to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - a bug, too, is reported as one line, with file and line number
        from taskqueue_cli.output import fail  # noqa: PLC0415 - slow to import

        return fail(error, as_json="--json" in arguments)
    return 0
