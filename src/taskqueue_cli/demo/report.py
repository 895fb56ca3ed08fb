"""The account at the end of a run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskqueue_cli.demo.check import Comparison
from taskqueue_cli.demo.plan import POISON_ATTEMPTS, DemoPlan
from taskqueue_core.retry import EXHAUSTED
from taskqueue_core.tasks import DeadLetter, Ledger, QueueStats, State


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that was killed."""

    worker: str
    pid: int
    held: int
    """deliveries that it had not settled"""
    replacement: str


class Check(msgspec.Struct, frozen=True):
    """One thing that must hold."""

    holds: bool
    what: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run found out."""

    plan: DemoPlan
    backend: str
    workers: int
    stats: QueueStats
    duplicates: int
    resent: int
    """tasks that were published a second time on purpose"""
    killed: Killed
    comparison: Comparison
    dead: tuple[DeadLetter, ...]
    seconds: float
    journal: Path | None = None
    """where the journal of the run is"""

    @property
    def rate(self) -> float:
        """Tasks that ended per second."""
        return self.plan.total / self.seconds

    @property
    def expected_retries(self) -> int:
        """Retries that were provoked: one per failing file, and those of the poison."""
        return len(self.plan.failing) + POISON_ATTEMPTS - 1

    @property
    def checks(self) -> tuple[Check, ...]:
        """Everything that must hold."""
        stats, ledger, plan = self.stats, self.stats.ledger, self.plan
        ended = ledger.done == len(plan.files) and ledger.published == plan.total
        right = self.comparison.compared - len(self.comparison.mismatches) - self.comparison.changed
        poison = [(dead_letter.task.id, dead_letter.reason) for dead_letter in self.dead]
        return (
            Check(
                ledger.balanced and ended,
                f"the ledger balances: {ledger.published:,} published, {ledger.done:,} done, {ledger.dead:,} dead",
            ),
            Check(
                not self.comparison.mismatches and self.comparison.compared == len(plan.files),
                f"{right:,} of {len(plan.files):,} results equal a direct computation",
            ),
            Check(
                stats.retried == self.expected_retries,
                f"{stats.retried:,} of {self.expected_retries:,} deliberately failed attempts were retried",
            ),
            Check(
                stats.lost >= 1 and stats.redelivered >= stats.lost,
                f"{stats.lost:,} deliveries of the killed worker were redelivered",
            ),
            Check(
                self.duplicates == self.resent,
                f"{self.duplicates:,} of {self.resent:,} tasks published twice were stored once",
            ),
            Check(
                poison == [(plan.poison_id, EXHAUSTED)] and ledger.dead == 1,
                f"only the poison task is a dead letter: {EXHAUSTED} after {POISON_ATTEMPTS} attempts",
            ),
        )

    @property
    def ok(self) -> bool:
        """Whether all of it holds."""
        return all(check.holds for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        stats, ledger = self.stats, self.stats.ledger
        return {
            "ok": self.ok,
            "backend": self.backend,
            "key": self.plan.key,
            "workers": self.workers,
            "files": len(self.plan.files),
            "published": ledger.published,
            "duplicates": self.duplicates,
            "delivered": stats.delivered,
            "done": ledger.done,
            "retried": stats.retried,
            "redelivered": stats.redelivered,
            "lost": stats.lost,
            "dead": ledger.dead,
            "ledger": msgspec.to_builtins(ledger) | {"balanced": ledger.balanced},
            "killed": self.killed,
            "dead_letters": [
                {
                    "task_id": dead_letter.task.id,
                    "reason": dead_letter.reason,
                    "attempts": dead_letter.attempt,
                }
                for dead_letter in self.dead
            ],
            "compared": self.comparison.compared,
            "mismatches": len(self.comparison.mismatches),
            "mismatched": self.comparison.mismatches[:20],
            "changed": self.comparison.changed,
            "unreadable": self.comparison.unreadable,
            "checks": self.checks,
            "seconds": round(self.seconds, 3),
            "tasks_per_second": round(self.rate, 1),
            "journal": None if self.journal is None else str(self.journal),
        }


REPORT_VARIABLE = "TASKQUEUE_DEMO_REPORT"
"""the command that makes a report of the kept journal, for who starts the demonstration by a command of their own"""
_MAX_SHOWN = 10


def summary(report: Report) -> RenderableType:
    """Return the ledger beside what was counted, then each check with its mark."""
    return Group(*_parts(report))


def _parts(report: Report) -> Iterator[RenderableType]:
    sheets = Table.grid(padding=(0, 6))
    sheets.add_row(_ledger(report.stats.ledger), _flow(report))
    yield Padding(sheets, (1, 0, 0, 2))
    yield Padding(_checks(report), (1, 0, 0, 2))
    comparison = report.comparison
    notes = [Text(f"wrong result: {path}", "red") for path in comparison.mismatches[:_MAX_SHOWN]]
    if comparison.changed:
        notes.append(Text(f"{comparison.changed:,} files were changed during the run", "yellow"))
    if comparison.unreadable:
        notes.append(
            Text(
                f"{comparison.unreadable:,} files could not be read by the worker and the check",
                "yellow",
            )
        )
    if notes:
        yield Padding(Group(*notes), (1, 0, 0, 4))
    verdict = (
        Text("Every task is accounted for.", "bold green")
        if report.ok
        else Text("A check failed: see above.", "bold red")
    )
    yield Padding(verdict, (1, 0, 0 if report.journal else 1, 2))
    if report.journal:
        yield Padding(_report_command(report.journal), (0, 0, 1, 2))


def _section(title: str) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, show_footer=False, pad_edge=False)
    table.title, table.title_style, table.title_justify = title, "bold", "left"
    table.add_column()
    table.add_column(justify="right")
    return table


def _ledger(ledger: Ledger) -> Table:
    table = _section("ledger")
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
    table = _section("flow")
    rows = (
        ("deliveries", stats.delivered),
        ("failed and retried", stats.retried),
        ("redelivered", stats.redelivered),
        (f"lost with {killed.worker}", stats.lost),
        ("published twice", report.resent),
        ("detected as duplicates", report.duplicates),
    )
    for index, (name, count) in enumerate(rows, start=1):
        table.add_row(name, _count(count), end_section=index == len(rows))
    table.add_row("seconds", Text(f"{report.seconds:,.1f}", "bold"))
    table.add_row("tasks per second", Text(f"{report.rate:,.0f}", "bold cyan"))
    table.add_row("worker processes", _count(report.workers))
    return table


def _checks(report: Report) -> Table:
    table = Table.grid(padding=(0, 1))
    for check in report.checks:
        mark = Text("✔", "green") if check.holds else Text("✘", "bold red")
        table.add_row(mark, Text(check.what, "" if check.holds else "red"))
    return table


def _report_command(journal: Path) -> Text:
    args = ("taskqueue", "pipeline", "report", "--journal", os.path.relpath(journal))
    return Text.assemble(
        ("Report of this run: ", "dim"),
        os.environ.get(REPORT_VARIABLE) or shlex.join(args),
        no_wrap=True,  # it is there to be copied
        overflow="ignore",
    )


def _count(number: int) -> Text:
    return Text(f"{number:,}", "bold" if number else "dim")
