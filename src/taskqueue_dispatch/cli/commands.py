"""The group of commands; alone it is a server with the dispatcher.

Only what every call of ``taskqueue`` may cost is imported here: no server, and no HTTP client.
"""

from __future__ import annotations

import inspect
from typing import Any

import typer
import typer.core

from taskqueue_cli.backends import with_empty_value
from taskqueue_cli.commands import serve
from taskqueue_dispatch.cli import config, demo, endpoints, jobs

_HELP = (
    "Send jobs to the GPU servers of models, one job per slot. Without a command it starts "
    "the server and takes the options of `taskqueue serve`; the commands below talk to a "
    "running server (TASKQUEUE_SERVER_URL)."
)
_PARTS = ["dispatch"]


class _Group(typer.core.TyperGroup):
    """A group with the option for an embedded store, which may stand without a directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_empty_value(args))


def add_to(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(
        name="dispatch",
        help=_HELP,
        cls=_Group,
        rich_markup_mode="rich",
        invoke_without_command=True,
    )
    group.callback()(_serving())
    for module in (demo, jobs, endpoints, config):
        module.add_to(group)
    app.add_typer(group)


def _serving() -> Any:
    """Return ``taskqueue serve`` with the dispatcher, as what the group does without a command."""

    def run(ctx: typer.Context, **options: Any) -> None:
        if ctx.invoked_subcommand is None:
            serve.run(**options, extensions=_PARTS)
        elif any(value not in {None, False} for value in options.values()):
            raise typer.BadParameter(
                f"server options cannot be combined with {ctx.invoked_subcommand}; put the "
                "options of a command after its name"
            )

    signature = inspect.signature(serve.run, eval_str=True)
    context = inspect.Parameter(
        "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    own = [
        parameter for parameter in signature.parameters.values() if parameter.name != "extensions"
    ]
    run.__signature__ = signature.replace(parameters=[context, *own])  # type: ignore[attr-defined]
    return run
