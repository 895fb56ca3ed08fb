"""The report of a demo run: its counts and its checks."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from taskqueue_cli.demo.check import Comparison
from taskqueue_cli.demo.plan import POISON_ATTEMPTS, DemoPlan
from taskqueue_cli.demo_frame.report import (
    Check,
    DemoReport,
    ledger_section,
    section,
    side_by_side,
)
from taskqueue_core.retry import EXHAUSTED
from taskqueue_core.tasks import DeadLetter, QueueStats

REPORT_VARIABLE = "TASKQUEUE_DEMO_REPORT"
"""environment variable with the command that the footer suggests, for programs that wrap ``taskqueue demo``"""
_MAX_SHOWN = 10


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that the demo killed on purpose, and its replacement."""

    worker: str
    pid: int
    held: int
    """number of deliveries that the worker had not settled when it was killed"""
    replacement: str


class Report(DemoReport, frozen=True, kw_only=True):
    """All counts and checks of a demo run."""

    subject: ClassVar[str] = "task"

    plan: DemoPlan
    backend: str
    workers: int
    stats: QueueStats
    duplicates: int
    resent: int
    """number of tasks published a second time on purpose"""
    killed: Killed
    comparison: Comparison
    dead: tuple[DeadLetter, ...]
    seconds: float
    journal: Path | None = None
    """path of the journal of the run; None if no journal was written"""

    @property
    def rate(self) -> float:
        """Number of tasks that ended per second."""
        return self.plan.total / self.seconds

    @property
    def expected_retries(self) -> int:
        """Number of retries caused on purpose: one for each failing file, plus those of the poison task."""
        return len(self.plan.failing) + POISON_ATTEMPTS - 1

    @property
    def checks(self) -> tuple[Check, ...]:
        """All conditions that a correct run meets."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON fields."""
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

    def tables(self) -> tuple[RenderableType, ...]:
        """Return one table row with the ledger and the flow of tasks side by side."""
        return (side_by_side(ledger_section(self.stats.ledger), self._flow()),)

    def _flow(self) -> Table:
        stats = self.stats
        return section(
            "flow",
            [
                ("deliveries", stats.delivered),
                ("failed and retried", stats.retried),
                ("redelivered", stats.redelivered),
                (f"lost with {self.killed.worker}", stats.lost),
                ("published twice", self.resent),
                ("detected as duplicates", self.duplicates),
            ],
            [
                ("seconds", Text(f"{self.seconds:,.1f}", "bold")),
                ("tasks per second", Text(f"{self.rate:,.0f}", "bold cyan")),
                ("worker processes", self.workers),
            ],
        )

    def notes(self) -> tuple[Text, ...]:
        """Return the names of files with wrong results, and the number of files that could not be compared."""
        comparison = self.comparison
        notes = [
            Text(f"wrong result: {path}", "red") for path in comparison.mismatches[:_MAX_SHOWN]
        ]
        for number, what in (
            (comparison.changed, "were changed during the run"),
            (comparison.unreadable, "could not be read by the worker and the check"),
        ):
            if number:
                notes.append(Text(f"{number:,} files {what}", "yellow"))
        return tuple(notes)

    def footer(self) -> tuple[Text, ...]:
        """Return the command that makes a report from the journal of the run, if a journal was written."""
        if self.journal is None:
            return ()
        args = ("taskqueue", "pipeline", "report", "--journal", os.path.relpath(self.journal))
        command = Text.assemble(
            ("Report of this run: ", "dim"),
            os.environ.get(REPORT_VARIABLE) or shlex.join(args),
            no_wrap=True,  # so that the command can be copied as one line
            overflow="ignore",
        )
        return (command,)
