"""Printing of the pipeline's tables and outcomes on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from taskqueue_cli.output import console, print_json
from taskqueue_spark.report.outcome import Outcome

_SHOWN = 30
"""maximum number of rows of a table on the terminal; ``--json`` prints more"""
_LONGEST = 70
_FOLDED = 16
"""minimum width of a column of texts, which are continued on the next line"""
_BETWEEN = 2
"""width of the space between two columns"""


def print_outcome(outcome: Outcome) -> None:
    """Print the title of an outcome in green, yellow or red."""
    colour = "green" if outcome.kind == "balanced" else "yellow" if outcome.ok else "red"
    console.print(Text(outcome.title, f"bold {colour}"))


def print_counts(counts: Mapping[str, int], *, as_json: bool) -> None:
    """Print counts by name, on one line or as JSON."""
    if as_json:
        print_json(counts)
    else:
        console.print(" · ".join(f"{name} {count:,}" for name, count in counts.items()))


def print_table(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], *, of: int | None = None
) -> None:
    """Print the named columns of the first rows. ``of``: total number of rows, if ``rows`` has only some of them.

    If the columns do not fit side by side, print several tables, each with the first column, so that no number is cut.
    """
    shown = rows[:_SHOWN]
    cells = {name: [_cell(row.get(name)) for row in shown] for name in columns}
    rigid = {
        name for name in columns if not any(isinstance(row.get(name), str | list) for row in shown)
    }
    for names in _parts(columns, cells, rigid):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for name in names:
            number = any(isinstance(row.get(name), int | float) for row in shown)
            table.add_column(
                name.replace("_", " "),
                justify="right" if number else "left",
                style="bold" if name == columns[0] else "",
                overflow="fold",
                min_width=_width(name, cells[name]) if name in rigid else None,
            )
        for values in zip(*(cells[name] for name in names), strict=True):
            table.add_row(*values)
        console.print(table)
    more = (len(rows) if of is None else of) - min(len(rows), _SHOWN)
    if more > 0:
        console.print(f"[dim]… and {more:,} more; --out DIR writes all rows to a folder[/]")


def _parts(
    columns: Sequence[str], cells: Mapping[str, Sequence[Text]], rigid: set[str]
) -> list[list[str]]:
    """Divide columns into groups that fit the terminal. Each group begins with the first column."""
    first, *others = columns
    parts = [[first]]
    for name in others:
        group = [*parts[-1], name]
        widths = (
            _width(column, cells[column], None if column in rigid else _FOLDED) for column in group
        )
        if len(parts[-1]) > 1 and sum(width + _BETWEEN for width in widths) > console.width:
            group = [first, name]
            parts.append(group)
        parts[-1] = group
    return parts


def _width(name: str, values: Sequence[Text], most: int | None = None) -> int:
    """Return the width of a column whose title may be wrapped between words, and its values beyond ``most``."""
    width = max((value.cell_len for value in values), default=0)
    title = max(map(len, name.split("_")))
    return max(title, width if most is None else min(width, most))


def _cell(value: Any) -> Text:
    match value:
        case None:
            return Text("-", "dim")
        case bool():
            return Text("✔", "green") if value else Text("✘", "bold red")
        case int():
            return Text(f"{value:,}", "" if value else "dim")
        case float():
            digits = ((100, ",.0f"), (10, ",.1f"), (0.1, ",.2f"), (0, ",.4g"))
            return Text(format(value, next((form for n, form in digits if abs(value) >= n), "")))
        case datetime():
            return Text(value.strftime("%m-%d %H:%M:%S"))
        case list():
            text = " ".join(map(str, value))
        case _:
            text = str(value)
    clean = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return Text(clean if len(clean) <= _LONGEST else clean[: _LONGEST - 1] + "…")
