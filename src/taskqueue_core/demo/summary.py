"""The account of a run, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskqueue_core.demo.report import Report
from taskqueue_core.tasks import Ledger

__all__ = ["summary"]

_SHOWN = 10


def summary(report: Report) -> RenderableType:
    """Return the ledger, what was counted, and each check with its mark."""
    return Group(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    yield Padding(_ledger(report.stats.ledger), (1, 0, 0, 0))
    yield Padding(_checks(report), (1, 0, 0, 0))
    comparison = report.comparison
    for path in comparison.mismatches[:_SHOWN]:
        yield Text(f"  wrong result: {path}", "red")
    if comparison.changed:
        yield Text(f"  {comparison.changed:,} files were changed during the run", "yellow")
    if comparison.unreadable:
        yield Text(f"  {comparison.unreadable:,} files could be read by neither side", "yellow")
    stats = report.stats
    told = (
        f"{report.plan.total:,} tasks in {report.seconds:.1f} s: {report.rate:,.0f} a second; "
        f"{stats.delivered:,} deliveries, {stats.retried:,} retried, {stats.redelivered:,} redelivered"
    )
    verdict = (
        Text("Every task is accounted for.", "bold green")
        if report.ok
        else Text("Something does not hold: see above.", "bold red")
    )
    yield Padding(Group(verdict, Text(told, "dim")), (1, 0, 1, 2))


def _ledger(ledger: Ledger) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(ledger.__struct_fields__):
        if index:
            table.add_column("=" if index == 1 else "+", style="dim")
        table.add_column(name.replace("_", " "), justify="right")
    sign = "=" if ledger.balanced else "≠"
    cells: list[Text] = []
    for index, name in enumerate(ledger.__struct_fields__):
        if index:
            cells.append(Text(sign if index == 1 else "+"))
        count = getattr(ledger, name)
        cells.append(Text(f"{count:,}", "bold" if count else "dim"))
    table.add_row(*cells)
    return table


def _checks(report: Report) -> Table:
    table = Table.grid(padding=(0, 1))
    for check in report.checks:
        mark = Text("✔", "green") if check.holds else Text("✘", "bold red")
        table.add_row(" ", mark, Text(check.what, "" if check.holds else "red"))
    return table
