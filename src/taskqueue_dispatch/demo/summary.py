"""The account of a run, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskqueue_core.tasks import Ledger, State
from taskqueue_dispatch.demo.report import Report

__all__ = ["summary"]

_COUNTED = (
    ("slots", "slots", ""),
    ("jobs", "jobs", ""),
    ("done", "done", "green"),
    ("failed", "failed", "red"),
    ("retried", "retried", "yellow"),
    ("redelivered", "redelivered", "magenta"),
    ("lost", "lost", "bold red"),
    ("run twice", "duplicates", "bold red"),
)
_WAITED = (("wait, half of them", "wait_p50"), ("wait, 95 of 100", "wait_p95"))


def summary(report: Report) -> RenderableType:
    """Return what became of each model's jobs, the ledger of all, and each check with its mark."""
    return Group(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    yield Padding(_models(report), (1, 0, 0, 2))
    sheets = Table.grid(padding=(0, 6))
    sheets.add_row(_ledger(report), _flow(report))
    yield Padding(sheets, (1, 0, 0, 2))
    yield Padding(_checks(report), (1, 0, 0, 2))
    verdict = (
        Text("Every job is accounted for.", "bold green")
        if report.ok
        else Text("Something does not hold: see above.", "bold red")
    )
    yield Padding(verdict, (1, 0, 1, 2))


def _models(report: Report) -> Table:
    """Return a table with a column for each model: so it fits where lines are short."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column()
    for one in report.models:
        table.add_column(one.name, justify="right")
    table.add_column("all", justify="right", style="dim")
    table.add_row("answers", *(Text(one.manner, "dim") for one in report.models))
    for words, name, style in _COUNTED:
        counts = [getattr(one, name) for one in report.models]
        cells = [Text(f"{count:,}", style if count else "dim") for count in counts]
        table.add_row(words, *cells, f"{sum(counts):,}")
    for words, name in _WAITED:
        table.add_row(words, *(f"{getattr(one, name):,.2f} s" for one in report.models))
    table.add_row("slots used", *(f"{one.utilisation:.0%}" for one in report.models))
    return table


def _sheet(title: str) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.title, table.title_style, table.title_justify = title, "bold", "left"
    table.add_column()
    table.add_column(justify="right")
    return table


def _ledger(report: Report) -> Table:
    ledger = sum((one.ledger for one in report.models), Ledger())
    table = _sheet("ledger")
    table.add_row("published", _count(ledger.published), end_section=True)
    states = list(State)
    for state in states:
        count = _count(getattr(ledger, state.value))
        table.add_row(state.value.replace("_", " "), count, end_section=state is states[-1])
    mark = Text("✔ balanced", "green") if ledger.balanced else Text("✘ not balanced", "bold red")
    table.add_row(mark, _count(ledger.published - ledger.imbalance))
    return table


def _flow(report: Report) -> Table:
    table = _sheet("on the way")
    calls = report.callbacks
    rows = (
        *((f"told {word}", count) for word, count in report.outcomes.items()),
        ("submitted twice", report.resent),
        ("callbacks delivered", calls.delivered),
        ("callbacks refused at first", calls.refused),
        (f"running on {report.crash.server} at its crash", report.crash.running),
    )
    for index, (name, count) in enumerate(rows, start=1):
        table.add_row(name, _count(count), end_section=index == len(rows))
    table.add_row("seconds", Text(f"{report.seconds:,.1f}", "bold"))
    table.add_row("jobs a second", Text(f"{report.jobs / report.seconds:,.1f}", "bold cyan"))
    return table


def _checks(report: Report) -> Table:
    table = Table.grid(padding=(0, 1))
    for check in report.checks:
        mark = Text("✔", "green") if check.holds else Text("✘", "bold red")
        table.add_row(mark, Text(check.what, "" if check.holds else "red"))
    return table


def _count(number: int) -> Text:
    return Text(f"{number:,}", "bold" if number else "dim")
