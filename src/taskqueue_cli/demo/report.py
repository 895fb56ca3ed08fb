"""The account at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from taskqueue_cli.demo.check import Comparison
from taskqueue_cli.demo.plan import POISON_ATTEMPTS, Plan
from taskqueue_core.retry import EXHAUSTED
from taskqueue_core.tasks import DeadLetter, QueueStats

__all__ = ["Check", "Killed", "Report"]


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

    plan: Plan
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
        poison = [(letter.task.id, letter.reason) for letter in self.dead]
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
                f"{stats.retried:,} of {self.expected_retries:,} attempts that failed on purpose were retried",
            ),
            Check(
                stats.lost >= 1 and stats.redelivered >= stats.lost,
                f"{stats.lost:,} deliveries lost with the killed worker ran elsewhere",
            ),
            Check(
                self.duplicates == self.resent,
                f"{self.duplicates:,} of {self.resent:,} tasks published twice were stored once",
            ),
            Check(
                poison == [(plan.poison_id, EXHAUSTED)] and ledger.dead == 1,
                f"the poison alone is dead: {EXHAUSTED} after {POISON_ATTEMPTS} attempts",
            ),
        )

    @property
    def ok(self) -> bool:
        """Whether all of it holds."""
        return all(check.holds for check in self.checks)

    def told(self) -> dict[str, Any]:
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
                {"task_id": letter.task.id, "reason": letter.reason, "attempts": letter.attempt}
                for letter in self.dead
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
