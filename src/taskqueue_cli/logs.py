"""Logs of long-running commands, on stderr."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

import typer

__all__ = ["LogFormat", "LogLevel", "set_up"]

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="What to log, on stderr.")
]


LogFormat = Literal["auto", "text", "json"]


def set_up(level: str, form: LogFormat = "auto") -> None:
    """Log to stderr from ``level`` on, in a format."""
    from taskqueue_server.logs import set_up_logs  # noqa: PLC0415 - it brings the server along

    set_up_logs(level=logging.getLevelNamesMapping()[level.upper()], form=form)
