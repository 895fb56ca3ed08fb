"""The group of commands.

Only what every call of ``taskqueue`` may cost is imported here: no Spark, nor anything else that takes its time.
"""

from __future__ import annotations

import typer

from taskqueue_spark.cli import bulk, report, stream, tables

_HELP = "Analyze a journal with Spark: lost tasks, latency, failures, capacity. Load and redrive tasks in bulk."
_EPILOG = (
    "The journal is the one of the configured backend (TASKQUEUE_BACKEND), or is read from "
    "--journal or --from. To write a journal, set `taskqueue queue set KEY --journal` on "
    "Redis, or TASKQUEUE_MEMORY_JOURNAL=FILE with the memory backend. The exit code is 1 if "
    "a check finds a loss, an imbalance or a violation."
)


def add_to(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(
        name="pipeline", help=_HELP, epilog=_EPILOG, no_args_is_help=True, rich_markup_mode="rich"
    )
    for module in (report, tables, bulk, stream):
        module.add_to(group)
    app.add_typer(group)
