"""The report at the end of a demo: tables, checks and the overall result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskqueue_core.tasks import Ledger, State


class Check(msgspec.Struct, frozen=True):
    """A condition that a correct run meets."""

    holds: bool
    what: str


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The base class of a demo's report."""

    subject: ClassVar[str]
    """noun for what the demo runs: ``task`` or ``job``"""

    @property
    def checks(self) -> tuple[Check, ...]:
        """All conditions that a correct run meets."""
        raise NotImplementedError

    def tables(self) -> tuple[RenderableType, ...]:
        """Return the tables that are shown above the checks."""
        raise NotImplementedError

    def notes(self) -> tuple[Text, ...]:
        """Return lines that are shown below the checks, for example files with wrong results."""
        return ()

    def footer(self) -> tuple[Text, ...]:
        """Return lines that are shown below the overall result."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON fields."""
        raise NotImplementedError

    @property
    def ok(self) -> bool:
        """Whether the condition of every check holds."""
        return all(check.holds for check in self.checks)

    def render(self) -> RenderableType:
        """Return the complete report for the console: tables, checks, notes, overall result and footer."""
        checks = Table.grid(padding=(0, 1))
        for check in self.checks:
            mark = Text("✔", "green") if check.holds else Text("✘", "bold red")
            checks.add_row(mark, Text(check.what, "" if check.holds else "red"))
        notes = [Padding(Group(*self.notes()), (1, 0, 0, 4))] if self.notes() else []
        if self.ok:
            result = Text(f"Every {self.subject} is accounted for.", "bold green")
        else:
            result = Text("A check failed: see above.", "bold red")
        return Group(
            *(Padding(part, (1, 0, 0, 2)) for part in (*self.tables(), checks)),
            *notes,
            Padding(Group(result, *self.footer()), (1, 0, 1, 2)),
        )


def side_by_side(*tables: Table) -> Table:
    """Return one table in which the given tables are side by side."""
    grid = Table.grid(padding=(0, 6))
    grid.add_row(*tables)
    return grid


def section(title: str, *groups: Iterable[tuple[str | Text, int | Text]]) -> Table:
    """Return a table of names and numbers, with a line between the groups of rows."""
    table = Table(box=box.SIMPLE, show_header=False, show_footer=False, pad_edge=False)
    table.title, table.title_style, table.title_justify = title, "bold", "left"
    table.add_column()
    table.add_column(justify="right")
    for rows in groups:
        for name, value in rows:
            table.add_row(name, count_text(value) if isinstance(value, int) else value)
        table.add_section()
    return table


def ledger_section(ledger: Ledger) -> Table:
    """Return a table of a ledger's counts, with a mark that shows whether they balance."""
    mark = Text("✔ balanced", "green") if ledger.balanced else Text("✘ not balanced", "bold red")
    return section(
        "ledger",
        [("published", ledger.published)],
        [(state.value.replace("_", " "), getattr(ledger, state.value)) for state in State],
        [(mark, ledger.published - ledger.imbalance)],
    )


def count_text(number: int, style: str = "") -> Text:
    """Format a number for a table cell; zero is dimmed."""
    return Text(f"{number:,}", f"bold {style}".strip() if number else "dim")
