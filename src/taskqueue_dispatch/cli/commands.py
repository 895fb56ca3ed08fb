"""The command group ``taskqueue dispatch``; without a subcommand it starts a server with the dispatcher."""

from __future__ import annotations

import inspect
from typing import Any

import typer
import typer.core

from taskqueue_cli.backends import with_empty_value
from taskqueue_cli.commands import serve
from taskqueue_dispatch.cli import demo, endpoints, jobs

_HELP = (
    "Send jobs to GPU servers, one job per slot. Without a subcommand, this starts the server and takes the "
    "options of `taskqueue serve`. All commands below except demo connect to a running server (TASKQUEUE_SERVER_URL)."
)


class _Group(typer.core.TyperGroup):
    """The command group, which accepts ``--embedded-redis`` with and without a directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_empty_value(args))


def add_to(app: typer.Typer) -> None:
    """Add the command group ``dispatch`` to ``app``."""
    group = typer.Typer(
        name="dispatch",
        help=_HELP,
        cls=_Group,
        rich_markup_mode="rich",
        invoke_without_command=True,
    )
    group.callback()(_serve_command())
    for module in (demo, jobs, endpoints):
        module.add_to(group)
    app.add_typer(group)


def _serve_command() -> Any:
    """Return a command that has the options of ``taskqueue serve`` and starts a server with the dispatcher."""

    def run(ctx: typer.Context, **options: Any) -> None:
        if ctx.invoked_subcommand is None:
            serve.run(**options, extensions=["dispatch"])
        elif any(value not in {None, False} for value in options.values()):
            raise typer.BadParameter(
                f"options of the server cannot be combined with {ctx.invoked_subcommand}; "
                f"put the options of {ctx.invoked_subcommand} after its name"
            )

    signature = inspect.signature(serve.run, eval_str=True)
    context = inspect.Parameter(
        "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    options = [value for name, value in signature.parameters.items() if name != "extensions"]
    run.__signature__ = signature.replace(parameters=[context, *options])  # type: ignore[attr-defined]
    return run
