"""The Typer application with all commands, and the conversion of exceptions to exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, cast

import typer

from taskqueue_cli.backends import BACKEND_HELP, ServeCommand
from taskqueue_cli.commands import (
    dead_letters,
    demo,
    migrate,
    publish,
    queues,
    serve,
    stats,
    status,
    token,
    version,
    worker,
)
from taskqueue_cli.output import INTERRUPTED, exit_code, fail, paragraphs
from taskqueue_core.errors import ConfigurationError, TaskQueueError

COMMANDS_GROUP = "taskqueue.commands"


class Commands(Protocol):
    """The interface of the objects that packages register as entry points of the group ``taskqueue.commands``."""

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
        raise ConfigurationError(f"the command {name} cannot be loaded: {reason}")

    app.command(
        name=name,
        help="[red]Cannot be loaded.[/]",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(broken)


app = typer.Typer(
    name="taskqueue",
    help="A task queue with pluggable backends: run a server, run workers, publish tasks, inspect queues.",
    epilog=(
        "Exit codes: 0 success; 1 failed; 2 wrong usage, input or configuration; 3 too many attempts failed in a row; "
        "4 store or server unavailable, or access refused; 130 interrupted. Settings come from "
        "TASKQUEUE_... variables, .env and taskqueue.toml."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (token.token, queues.queue, dead_letters.dlq, migrate.migrate):
    app.add_typer(group)
app.callback()(version.options)


def _add(command: Callable[..., None], name: str, *notes: str, **more: Any) -> None:
    """Add a command whose help is its docstring, followed by notes."""
    text = paragraphs(command.__doc__)
    short = text.partition("\n")[0]
    app.command(name, help="\n\n".join((text, *notes)), short_help=short, **more)(command)


_add(serve.run, "serve", cls=ServeCommand)
_add(worker.run, "worker")
_add(publish.publish, "publish", BACKEND_HELP)
_add(stats.show, "stats", f"{BACKEND_HELP} Exits with 1 if a ledger does not balance.")
_add(status.status, "status", BACKEND_HELP)
_add(status.result, "result", BACKEND_HELP)
_add(status.cancel, "cancel", BACKEND_HELP)
_add(status.purge, "purge", BACKEND_HELP)
_add(stats.workers, "workers", BACKEND_HELP)
_add(demo.run, "demo")
_add(version.show, "version")
mount(app)


@cache  # creating the click command of the application takes longer than running most commands
def _command() -> Callable[..., object]:
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    as_json = "--json" in arguments
    try:
        _command()(args=list(arguments), prog_name="taskqueue")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The program that reads stdout, for example `head`, closed the pipe. The interpreter flushes stdout when it
        # exits, which would raise the error again, so redirect stdout to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TaskQueueError as error:
        fail(error, as_json=as_json)
        return exit_code(error)
    except Exception as error:  # noqa: BLE001 - a bug is reported as one line, with file and line number
        fail(error, as_json=as_json)
        return 1
    return 0
