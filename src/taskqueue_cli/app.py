"""All commands together, and what becomes of their errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache

import typer

from taskqueue_cli.commands import (
    dead_letters,
    demo,
    migrate,
    publish,
    queues,
    serve,
    stats,
    token,
    version,
    worker,
)
from taskqueue_cli.commands import status as lookup
from taskqueue_cli.failures import INTERRUPTED, exit_code
from taskqueue_cli.mounted import mount
from taskqueue_cli.output import fail
from taskqueue_core.errors import TaskQueueError

__all__ = ["app", "run"]

app = typer.Typer(
    name="taskqueue",
    help="A task queue with pluggable backends: serve it, work for it, publish to it, look into it.",
    epilog=(
        "Exit codes: 0 done; 1 failed; 2 wrong usage, input or configuration; 3 worker quarantined; "
        "4 store or server out of reach; 130 interrupted. Settings come from TASKQUEUE_... variables, "
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
    lookup,
    migrate,
    demo,
    version,
):
    module.add_to(app)
mount(app)


@cache  # to put it together takes longer than most commands
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
        # The reader has gone, as `head` does. The interpreter must not trip over it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TaskQueueError as error:
        fail(error, as_json=as_json)
        return exit_code(error)
    except Exception as error:  # noqa: BLE001 - a bug is one line too, with its place
        fail(error, as_json=as_json)
        return 1
    return 0
