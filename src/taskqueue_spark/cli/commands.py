"""The group of commands ``taskqueue pipeline``, and the options that the commands share.

Every run of the command ``taskqueue`` imports this package, so it must not import Spark or any other slow module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import typer

from taskqueue_cli.output import paragraphs
from taskqueue_spark.cli import bulk, report, stream, tables
from taskqueue_spark.cli.options import EngineOptions

_HELP = "Analyze a journal with Spark: lost tasks, latency, failures, capacity. Load and redrive tasks in bulk."
_EPILOG = (
    "All commands except load read a journal: by default that of the configured backend (TASKQUEUE_BACKEND), or the "
    "one that --backend, --journal or --from names. To make a queue write a journal, run `taskqueue queue set KEY "
    "--journal` on Redis, or set TASKQUEUE_MEMORY_JOURNAL=FILE for the memory backend. The exit code is 1 if a check "
    "finds a loss, an imbalance or a violation."
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    report.report, tables.snapshot, tables.audit, tables.history, tables.latency, tables.throughput, tables.fairness,
    tables.failures, tables.capacity, bulk.load, bulk.redrive, stream.stream,
)  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Add the group of commands to ``app``."""
    group = typer.Typer(
        name="pipeline", help=_HELP, epilog=_EPILOG, no_args_is_help=True, rich_markup_mode="rich"
    )
    for command in _COMMANDS:
        help_text = paragraphs(command.__doc__)
        group.command(name=command.__name__, help=help_text)(_with_shared_options(command))
    app.add_typer(group)


def _with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one parameter for each shared option, instead of one parameter for all of them."""
    hints = get_type_hints(command, include_extras=True)
    first, *own = (
        parameter.replace(annotation=hints[parameter.name])
        for parameter in inspect.signature(command).parameters.values()
    )
    kind: type[EngineOptions] = first.annotation
    annotations = get_type_hints(kind, include_extras=True)
    # Put the options of `EngineOptions`, which all commands have, at the end.
    names = sorted(annotations, key=EngineOptions.__annotations__.__contains__)
    defaults = {field.name: field.default for field in fields(kind)}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(kind(**{name: values.pop(name) for name in names}), **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(name, keyword, default=defaults[name], annotation=annotations[name])
        for name in names
    ]
    parameters = [*own, *shared]
    signature = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__
    return run
