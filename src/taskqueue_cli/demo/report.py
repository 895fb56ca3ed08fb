"""The report of a demo run: its counts and its checks."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from rich.console import RenderableType
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

REPORT_VARIABLE = "_TASKQUEUE_DEMO_REPORT"
"""name of an environment variable; if it is set, the footer shows its value as the command that prints the report"""
_MAX_SHOWN = 10
_FLOW = ("delivered", "retried", "redelivered", "lost")


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
    def checks(self) -> tuple[Check, ...]:
        stats, ledger, plan = self.stats, self.stats.ledger, self.plan
        ended = ledger.done == len(plan.files) and ledger.published == plan.total
        right = self.comparison.compared - len(self.comparison.mismatches) - self.comparison.changed
        poison = [(dead_letter.task.id, dead_letter.reason) for dead_letter in self.dead]
        deliberate = len(plan.failing) + POISON_ATTEMPTS - 1
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
                stats.retried == deliberate,
                f"{stats.retried:,} of {deliberate:,} deliberately failed attempts were retried",
            ),
            Check(
                stats.lost >= 1 and stats.redelivered >= stats.lost,
                f"deliveries of the killed worker that were redelivered: {stats.lost:,}",
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
        stats, ledger, comparison = self.stats, self.stats.ledger, self.comparison
        return {
            "ok": self.ok,
            "backend": self.backend,
            "key": self.plan.key,
            "workers": self.workers,
            "files": len(self.plan.files),
            "duplicates": self.duplicates,
            **{name: getattr(ledger, name) for name in ("published", "done", "dead")},
            **{name: getattr(stats, name) for name in _FLOW},
            "ledger": msgspec.to_builtins(ledger) | {"balanced": ledger.balanced},
            "killed": self.killed,
            "dead_letters": [
                {"task_id": letter.task.id, "reason": letter.reason, "attempts": letter.attempt}
                for letter in self.dead
            ],
            **msgspec.structs.asdict(comparison),
            "mismatches": len(comparison.mismatches),
            "mismatched": comparison.mismatches[:20],
            "checks": self.checks,
            "seconds": round(self.seconds, 3),
            "tasks_per_second": round(self.plan.total / self.seconds, 1),
            "journal": None if self.journal is None else str(self.journal),
        }

    def tables(self) -> tuple[RenderableType, ...]:
        stats = self.stats
        flow = section(
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
                ("tasks per second", Text(f"{self.plan.total / self.seconds:,.0f}", "bold cyan")),
                ("worker processes", self.workers),
            ],
        )
        return (side_by_side(ledger_section(stats.ledger), flow),)

    def notes(self) -> tuple[Text, ...]:
        found = self.comparison
        counts = {
            "files that were changed during the run": found.changed,
            "files that neither the worker nor the check could read": found.unreadable,
        }
        return (
            *(Text(f"wrong result: {path}", "red") for path in found.mismatches[:_MAX_SHOWN]),
            *(Text(f"{what}: {number:,}", "yellow") for what, number in counts.items() if number),
        )

    def footer(self) -> tuple[Text, ...]:
        if self.journal is None:
            return ()
        args = ("taskqueue", "pipeline", "report", "--journal", os.path.relpath(self.journal))
        command = os.environ.get(REPORT_VARIABLE) or shlex.join(args)
        # Do not wrap the line, so that the command can be copied.
        label = ("Report of this run: ", "dim")
        return (Text.assemble(label, command, no_wrap=True, overflow="ignore"),)
