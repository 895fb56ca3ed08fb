"""The account at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskqueue_cli.demo.report import Check
from taskqueue_core.tasks import Ledger, State


class OfModel(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the jobs of one model. Times are seconds."""

    name: str
    mode: str = msgspec.field(name="manner")
    """how its servers answer"""
    slots: int
    jobs: int
    done: int
    failed: int
    """in the dead letters, with their reason"""
    retried: int
    redelivered: int
    """handed out again without a failure: their server was busy, or has gone"""
    lost: int
    """jobs of which nobody knows what became of them"""
    duplicates: int
    """jobs that were run to their end more than once"""
    wrong: int
    """jobs that are done with another result than a direct computation has"""
    wait_p50: float
    wait_p95: float
    """from the answer to the submission until a server has begun"""
    utilisation: float
    """the share of its slots' time in which a server worked, between its first and its last job"""
    crowded: tuple[str, ...] = ()
    """servers that ran more of its jobs at once than they have slots for"""
    ledger: Ledger


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """The server that crashed."""

    server: str
    running: int
    """jobs that ran there then"""
    recovered: int
    """those of them that have ended since, done or failed as they always do"""


class FalseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The server that said that it ran nothing."""

    server: str
    denied: int
    """jobs that ran there meanwhile"""


class Callbacks(msgspec.Struct, frozen=True, kw_only=True):
    """What came to the receiver."""

    expected: int
    delivered: int
    """jobs whose callback it has accepted"""
    refused: int
    """those that it refused on purpose, at first"""
    forged: int
    """with a signature that does not hold"""


class DispatchDemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run found out."""

    backend: str
    seed: int
    models: tuple[OfModel, ...]
    outcomes: dict[str, int]
    """the answers to submissions, by their word; who was told that there are no slots tried again"""
    resent: int
    """jobs that were submitted a second time on purpose"""
    crash: Crash
    lie: FalseReport
    poison: int
    """jobs that fail always"""
    reasons: dict[str, int]
    """of the dead letters"""
    callbacks: Callbacks
    held: int
    """slots that were bound to a job at the end"""
    seconds: float

    @property
    def jobs(self) -> int:
        """How many there were."""
        return sum(model.jobs for model in self.models)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Everything that must hold."""
        jobs, done = self.jobs, sum(model.done for model in self.models)
        failed, lost = sum(o.failed for o in self.models), sum(o.lost for o in self.models)
        ledgers = [model.ledger for model in self.models]
        right = done - sum(model.wrong for model in self.models)
        duplicates = sum(model.duplicates for model in self.models)
        calls, crash, lie = self.callbacks, self.crash, self.lie
        return (
            Check(
                lost == 0 and done + failed == jobs,
                f"every job is accounted for: {jobs:,} submitted, {done:,} done, {failed:,} failed, {lost:,} lost",
            ),
            Check(
                all(ledger.balanced for ledger in ledgers)
                and sum(ledger.published for ledger in ledgers) == jobs,
                f"the ledgers balance, and {self.resent:,} jobs submitted twice were stored once",
            ),
            Check(right == done, f"{right:,} of {done:,} results equal a direct computation"),
            Check(duplicates == 0, f"{duplicates:,} jobs were run to their end twice"),
            Check(
                not any(model.crowded for model in self.models),
                "no server ran more at once than it has slots",
            ),
            Check(
                crash.running > 0 and crash.recovered == crash.running,
                f"{crash.recovered:,} of {crash.running:,} jobs that ran on {crash.server} when it crashed have ended",
            ),
            Check(
                lie.denied > 0,
                f"{lie.server} denied {lie.denied:,} jobs that it ran, and none came of it",
            ),
            Check(
                failed == self.poison,
                f"the {self.poison:,} jobs that always fail alone are dead letters",
            ),
            Check(
                calls.delivered == calls.expected and not calls.forged,
                f"{calls.delivered:,} of {calls.expected:,} callbacks delivered, each signed; "
                f"{calls.refused:,} were refused at first",
            ),
            Check(self.held == 0, f"{self.held:,} slots are bound to a job at the end"),
        )

    @property
    def ok(self) -> bool:
        """Whether all of it holds."""
        return all(check.holds for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        for model, item in zip(fields["models"], self.models, strict=True):
            model["ledger"]["balanced"] = item.ledger.balanced
        return {
            "ok": self.ok,
            "jobs": self.jobs,
            **fields,
            "checks": msgspec.to_builtins(self.checks),
        }


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


def summary(report: DispatchDemoReport) -> RenderableType:
    """Return what became of each model's jobs, the ledger of all, and each check with its mark."""
    return Group(*_parts(report))


def _parts(report: DispatchDemoReport) -> Iterator[RenderableType]:
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


def _models(report: DispatchDemoReport) -> Table:
    """Return a table with a column for each model: so it fits where lines are short."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column()
    for model in report.models:
        table.add_column(model.name, justify="right")
    table.add_column("all", justify="right", style="dim")
    table.add_row("answers", *(Text(model.mode, "dim") for model in report.models))
    for names, name, style in _COUNTED:
        counts = [getattr(model, name) for model in report.models]
        cells = [Text(f"{count:,}", style if count else "dim") for count in counts]
        table.add_row(names, *cells, f"{sum(counts):,}")
    for words, name in _WAITED:
        table.add_row(words, *(f"{getattr(model, name):,.2f} s" for model in report.models))
    table.add_row("slots used", *(f"{model.utilisation:.0%}" for model in report.models))
    return table


def _sheet(title: str) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.title, table.title_style, table.title_justify = title, "bold", "left"
    table.add_column()
    table.add_column(justify="right")
    return table


def _ledger(report: DispatchDemoReport) -> Table:
    ledger = sum((model.ledger for model in report.models), Ledger())
    table = _sheet("ledger")
    table.add_row("published", _count(ledger.published), end_section=True)
    states = list(State)
    for state in states:
        count = _count(getattr(ledger, state.value))
        table.add_row(state.value.replace("_", " "), count, end_section=state is states[-1])
    mark = Text("✔ balanced", "green") if ledger.balanced else Text("✘ not balanced", "bold red")
    table.add_row(mark, _count(ledger.published - ledger.imbalance))
    return table


def _flow(report: DispatchDemoReport) -> Table:
    table = _sheet("on the way")
    calls = report.callbacks
    rows = (
        *((f"told {name}", count) for name, count in report.outcomes.items()),
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


def _checks(report: DispatchDemoReport) -> Table:
    table = Table.grid(padding=(0, 1))
    for check in report.checks:
        mark = Text("✔", "green") if check.holds else Text("✘", "bold red")
        table.add_row(mark, Text(check.what, "" if check.holds else "red"))
    return table


def _count(number: int) -> Text:
    return Text(f"{number:,}", "bold" if number else "dim")
