"""The account at the end of a run."""

from __future__ import annotations

from typing import Any

import msgspec

from taskqueue_cli.demo.report import Check
from taskqueue_core.tasks import Ledger

__all__ = ["Callbacks", "Crash", "Lie", "OfModel", "Report"]


class OfModel(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the jobs of one model. Times are seconds."""

    name: str
    manner: str
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


class Lie(msgspec.Struct, frozen=True, kw_only=True):
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


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run found out."""

    backend: str
    seed: int
    models: tuple[OfModel, ...]
    outcomes: dict[str, int]
    """the answers to submissions, by their word; who was told that there are no slots tried again"""
    resent: int
    """jobs that were submitted a second time on purpose"""
    crash: Crash
    lie: Lie
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
        return sum(one.jobs for one in self.models)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Everything that must hold."""
        jobs, done = self.jobs, sum(one.done for one in self.models)
        failed, lost = sum(o.failed for o in self.models), sum(o.lost for o in self.models)
        ledgers = [one.ledger for one in self.models]
        right = done - sum(one.wrong for one in self.models)
        duplicates = sum(one.duplicates for one in self.models)
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
                not any(one.crowded for one in self.models),
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

    def told(self) -> dict[str, Any]:
        """Return it for programs."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        for model, one in zip(told["models"], self.models, strict=True):
            model["ledger"]["balanced"] = one.ledger.balanced
        return {
            "ok": self.ok,
            "jobs": self.jobs,
            **told,
            "checks": msgspec.to_builtins(self.checks),
        }
