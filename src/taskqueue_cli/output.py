"""Functions that all commands share: declaring options, printing text or JSON, and choosing the exit code."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import IO, Annotated, Any, Literal

import msgspec
import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from taskqueue_core.errors import (
    BackendUnavailable,
    ConfigurationError,
    InvalidInput,
    PublishUnconfirmed,
    QueueFull,
    TaskQueueError,
)
from taskqueue_core.limits import escape_controls


def option(help_text: str, *names: str, **more: Any) -> Any:
    """Declare an option. The help shows no default value, because ``help_text`` describes the default, if any."""
    return typer.Option(*names, help=help_text, show_default=False, **more)


def argument(help_text: str, **more: Any) -> Any:
    """Declare an argument. The help shows no default value, because ``help_text`` describes the default, if any."""
    return typer.Argument(help=help_text, show_default=False, **more)


AsJson = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON value on stdout, and nothing else.")
]

_UNWRAPPED = 10_000
_CONTROLS = re.compile("[\x7f-\x9f]")


class SafeConsole(Console):
    """A console without highlighting that escapes control characters, because texts of tasks may contain any."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None) -> None:
        super().__init__(stderr=stderr, file=file, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNWRAPPED  # a program reads lines, not a width

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=escape_controls(segment.text, keep="\n"))


console = SafeConsole()
_stderr = SafeConsole(stderr=True)


def print_json(value: Any) -> None:
    """Print one JSON value on one line; on a terminal, indent it if the line would be too long."""
    data = msgspec.json.encode(value)
    if sys.stdout.isatty() and len(data) > console.width:
        data = msgspec.json.format(data, indent=2)
    # JSON need not escape these control characters, but a terminal interprets them.
    text = _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", data.decode())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def paragraphs(text: str | None) -> str:
    """Return a docstring with each paragraph on one line, so that the terminal can wrap it at any width."""
    parts = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


def print_fields(fields: Mapping[str, str]) -> None:
    """Print names and values in two columns. Fields with an empty value are omitted."""
    grid = Table.grid(padding=(0, 2))
    for name, value in fields.items():
        if value:
            grid.add_row(Text(name, "dim"), Text(escape_controls(value, keep="\n")))
    console.print(grid)


def make_table(
    name: str, *, numbers: Iterable[str] = (), texts: Iterable[str] = (), padding: int = 1
) -> Table:
    """Return a table without rows. Its columns are ``name`` in bold, then right-aligned numbers, then texts."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding), pad_edge=False)
    table.add_column(name, style="bold", overflow="fold")
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    for title in texts:
        table.add_column(title, overflow="fold")
    return table


def note(text: str, style: str = "") -> None:
    """Print a message on stderr, because stdout contains only results."""
    _stderr.print(Text(text, style), soft_wrap=True)


def fail(error: Exception, *, as_json: bool) -> int:
    """Print an error as one red line on stderr, with ``as_json`` also as JSON on stdout, and return the exit code."""
    detail = " ".join(_message_of(error).split())
    if as_json:
        code = error.code if isinstance(error, TaskQueueError) else "internal"
        fields: dict[str, object] = {"code": code, "detail": detail}
        if isinstance(error, InvalidInput):
            fields["field"] = error.field
        if isinstance(error, QueueFull):
            fields |= {"retry_after": error.retry_after, "depth": error.depth}
        print_json({"error": fields})
    _stderr.print(Text(f"error: {detail}", "bold red"), soft_wrap=True)
    return exit_code(error) if isinstance(error, TaskQueueError) else FAILED


def _message_of(error: Exception) -> str:
    if isinstance(error, TaskQueueError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"unexpected {type(error).__name__}: {error}{where}"


FAILED = 1
INTERRUPTED = 130
_USAGE = 2
_UNAVAILABLE = 4


def exit_code(error: TaskQueueError) -> int:
    """Return the exit code for an error: its attribute ``exit_code`` if it has one, otherwise by its class."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    if isinstance(error, ConfigurationError | InvalidInput):
        return _USAGE
    if isinstance(error, BackendUnavailable | PublishUnconfirmed):
        return _UNAVAILABLE
    return FAILED


LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(help="Minimum level of the log messages on stderr."),
]


LogFormat = Literal["auto", "text", "json"]
LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    option("Minimum level of the log messages on stderr. Default: TASKQUEUE_LOG_LEVEL."),
]
LogFormatOption = Annotated[
    LogFormat | None,
    option(
        "Log format: text (key=value pairs), json (one object per line), or auto (short lines on a terminal, "
        "otherwise text). Default: TASKQUEUE_LOG_FORMAT."
    ),
]


def configure_logging(level: str, form: LogFormat = "auto", *, everything: bool = False) -> None:
    """Write log messages of ``level`` and above to stderr; with ``everything``, those of all loggers."""
    from taskqueue_core.logs import set_up_logs  # noqa: PLC0415 - slow to import

    number = logging.getLevelNamesMapping()[level.upper()]
    set_up_logs(level=number, form=form, everything=everything)
