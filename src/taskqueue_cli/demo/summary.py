"""The account of a run, for people."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskqueue_cli.demo.report import Report
from taskqueue_core.tasks import Ledger, State

__all__ = ["REPORT_VARIABLE", "summary"]

REPORT_VARIABLE = "TASKQUEUE_DEMO_REPORT"
"""the command that makes a report of the kept journal, for who starts the demonstration by a command of their own"""
_SHOWN = 10


def summary(report: Report) -> RenderableType:
    """Return the ledger beside what was counted, then each check with its mark."""
    return Group(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    sheets = Table.grid(padding=(0, 6))
    sheets.add_row(_ledger(report.stats.ledger), _flow(report))
    yield Padding(sheets, (1, 0, 0, 2))
    yield Padding(_checks(report), (1, 0, 0, 2))
    comparison = report.comparison
    notes = [Text(f"wrong result: {path}", "red") for path in comparison.mismatches[:_SHOWN]]
    if comparison.changed:
        notes.append(Text(f"{comparison.changed:,} files were changed during the run", "yellow"))
    if comparison.unreadable:
        notes.append(Text(f"{comparison.unreadable:,} files: neither side could read", "yellow"))
    if notes:
        yield Padding(Group(*notes), (1, 0, 0, 4))
    verdict = (
        Text("Every task is accounted for.", "bold green")
        if report.ok
        else Text("Something does not hold: see above.", "bold red")
    )
    yield Padding(verdict, (1, 0, 0 if report.journal else 1, 2))
    if report.journal:
        yield Padding(_looking_back(report.journal), (0, 0, 1, 2))


def _sheet(title: str) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, show_footer=False, pad_edge=False)
    table.title, table.title_style, table.title_justify = title, "bold", "left"
    table.add_column()
    table.add_column(justify="right")
    return table


def _ledger(ledger: Ledger) -> Table:
    table = _sheet("ledger")
    table.add_row("published", _count(ledger.published), end_section=True)
    states = list(State)
    for state in states:
        last = state is states[-1]
        table.add_row(
            state.value.replace("_", " "), _count(getattr(ledger, state.value)), end_section=last
        )
    mark = Text("✔ balanced", "green") if ledger.balanced else Text("✘ not balanced", "bold red")
    table.add_row(mark, _count(ledger.published - ledger.imbalance))
    return table


def _flow(report: Report) -> Table:
    stats, killed = report.stats, report.killed
    table = _sheet("on the way")
    rows = (
        ("deliveries", stats.delivered),
        ("failed and retried", stats.retried),
        ("redelivered", stats.redelivered),
        (f"lost with {killed.worker}", stats.lost),
        ("published twice", report.resent),
        ("found duplicate", report.duplicates),
    )
    for index, (name, count) in enumerate(rows, start=1):
        table.add_row(name, _count(count), end_section=index == len(rows))
    table.add_row("seconds", Text(f"{report.seconds:,.1f}", "bold"))
    table.add_row("tasks a second", Text(f"{report.rate:,.0f}", "bold cyan"))
    table.add_row("worker processes", _count(report.workers))
    return table


def _checks(report: Report) -> Table:
    table = Table.grid(padding=(0, 1))
    for check in report.checks:
        mark = Text("✔", "green") if check.holds else Text("✘", "bold red")
        table.add_row(mark, Text(check.what, "" if check.holds else "red"))
    return table


def _looking_back(journal: Path) -> Text:
    words = ("taskqueue", "pipeline", "report", "--journal", os.path.relpath(journal))
    return Text.assemble(
        ("Where its time went: ", "dim"),
        os.environ.get(REPORT_VARIABLE) or shlex.join(words),
        no_wrap=True,  # it is there to be copied
        overflow="ignore",
    )


def _count(number: int) -> Text:
    return Text(f"{number:,}", "bold" if number else "dim")
