"""The group of commands.

Only what every call of ``taskqueue`` may cost is imported here: no Spark, nor anything else that takes its time.
"""

from __future__ import annotations

import typer

from taskqueue_spark.cli import bulk, report, stream, tables

__all__ = ["add_to"]

_HELP = (
    "Look into a journal with Spark: was anything lost, where does the time go, which failures repeat, what limits "
    "should there be; and load or redrive tasks in bulk."
)
_EPILOG = (
    "The journal is that of the configured backend (TASKQUEUE_BACKEND), or from --journal or --from. Queues write one "
    "if their settings say so (`taskqueue queue set KEY --journal`, which Redis needs; with the memory backend "
    "TASKQUEUE_MEMORY_JOURNAL=FILE). Exit codes as ever; 1 also where a check finds a loss, an imbalance, a violation."
)


def add_to(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(
        name="pipeline", help=_HELP, epilog=_EPILOG, no_args_is_help=True, rich_markup_mode="rich"
    )
    for module in (report, tables, bulk, stream):
        module.add_to(group)
    app.add_typer(group)
