"""Tables of the pipeline for people and programs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from taskqueue_cli.output import console

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


MOST = 1000
"""rows that a program is told"""
_SHOWN = 30
"""rows that a person is shown"""
_LONGEST = 70


def rows_of(frame: DataFrame, *order: str, most: int = MOST) -> list[dict[str, Any]]:
    """Return the first rows in an order, with times that know their zone; ``-name`` orders from the highest."""
    columns = [
        frame[name[1:]].desc_nulls_last() if name.startswith("-") else frame[name].asc_nulls_last()
        for name in order
    ]
    frame = frame.orderBy(*columns) if columns else frame
    matches: list[dict[str, Any]] = frame.limit(most).toArrow().to_pylist()
    return matches


def printed(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], *, of: int | None = None
) -> None:
    """Show some columns of rows; ``of``: how many there are."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        number = any(isinstance(row.get(name), int | float) for row in rows)
        table.add_column(
            name.replace("_", " "),
            justify="right" if number else "left",
            style="bold" if index == 0 else "",
            overflow="fold",
        )
    for row in rows[:_SHOWN]:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    console.print(table)
    more = (len(rows) if of is None else of) - min(len(rows), _SHOWN)
    if more > 0:
        console.print(f"[dim]… and {more:,} more: --out DIR keeps all of them[/]")


def _cell(value: Any) -> Text:
    match value:
        case None:
            return Text("-", "dim")
        case bool():
            return Text("✔", "green") if value else Text("✘", "bold red")
        case int():
            return Text(f"{value:,}", "" if value else "dim")
        case float():
            return Text(_number(value))
        case datetime():
            return Text(value.strftime("%m-%d %H:%M:%S"))
        case list():
            text = " ".join(map(str, value))
        case _:
            text = str(value)
    clean = "".join(
        dead_letter if dead_letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for dead_letter in text
    )
    return Text(clean if len(clean) <= _LONGEST else clean[: _LONGEST - 1] + "…")


def _number(value: float) -> str:
    for least, form in ((100, ",.0f"), (10, ",.1f"), (0.1, ",.2f"), (0, ",.4g")):
        if abs(value) >= least:
            return format(value, form)
    return str(value)
