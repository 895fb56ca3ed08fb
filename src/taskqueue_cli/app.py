"""The application of all commands, and the handling of their errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, cast

import typer

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
from taskqueue_cli.output import INTERRUPTED, exit_code, fail
from taskqueue_core.errors import ConfigurationError, TaskQueueError

COMMANDS_GROUP = "taskqueue.commands"


class Commands(Protocol):
    """The object of an entry point in the group ``taskqueue.commands``."""

    def add_to(self, app: typer.Typer) -> None:
        """Add commands or groups of commands."""


def mount(app: typer.Typer, points: Iterable[EntryPoint] | None = None) -> None:
    """Add the commands of installed packages, in the order of their names.

    If an entry point cannot be loaded, its command reports this; the other commands are not affected.
    """
    for point in sorted(entry_points(group=COMMANDS_GROUP) if points is None else points):
        try:
            cast("Commands", point.load()).add_to(app)
        except Exception as error:  # noqa: BLE001 - a package may raise anything; its command reports it
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
        "Exit codes: 0 success; 1 failed; 2 wrong usage, input or configuration; 3 worker quarantined; "
        "4 store or server unavailable; 130 interrupted. Settings come from TASKQUEUE_... variables, "
        ".env and taskqueue.toml."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    serve,
    token,
    worker,
    publish,
    stats,
    queues,
    dead_letters,
    status,
    migrate,
    demo,
    version,
):
    module.add_to(app)
mount(app)


@cache  # building it takes longer than most commands
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
        # The reader closed the pipe, for example `head`. Prevent a second error when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TaskQueueError as error:
        fail(error, as_json=as_json)
        return exit_code(error)
    except Exception as error:  # noqa: BLE001 - a bug is reported as one line, with its place
        fail(error, as_json=as_json)
        return 1
    return 0
