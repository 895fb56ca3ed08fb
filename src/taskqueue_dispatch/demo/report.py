"""The report at the end of a run of the dispatcher's demo."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from taskqueue_cli.demo_frame.report import (
    Check,
    DemoReport,
    ledger_section,
    section,
    side_by_side,
)
from taskqueue_core.tasks import Ledger

_COUNTS = (
    ("slots", "slots", ""),
    ("jobs", "jobs", ""),
    ("done", "done", "green"),
    ("failed", "failed", "red"),
    ("retried", "retried", "yellow"),
    ("redelivered", "redelivered", "magenta"),
    ("lost", "lost", "bold red"),
    ("run twice", "duplicates", "bold red"),
)
_WAITS = (("median wait", "wait_p50"), ("wait, 95th percentile", "wait_p95"))


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures about the jobs of one model. Times are in seconds."""

    name: str
    mode: str = msgspec.field(name="manner")
    """how the model's servers return results: synchronously, polled or pushed"""
    slots: int
    jobs: int
    done: int
    failed: int
    """number of dead letters"""
    retried: int
    redelivered: int
    """number of redeliveries that do not count as failures, for example because the job's server was busy or down"""
    lost: int
    """number of jobs that are neither done nor dead letters"""
    duplicates: int
    """number of jobs that ran to completion more than once"""
    wrong: int
    """number of jobs with a wrong result; the audit computes the expected results itself"""
    wait_p50: float
    wait_p95: float
    """95th percentile of the time from a job's confirmation to its start on a server"""
    utilisation: float
    """fraction of the slots' time that jobs used, from the first to the last start of a job"""
    crowded: tuple[str, ...] = ()
    """names of the servers that ran more jobs at once than they have slots"""
    ledger: Ledger


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """The crash of a server during the run."""

    server: str
    running: int
    """number of jobs that were running on the server when it crashed"""
    recovered: int
    """number of jobs that were running at the crash and have ended since"""


class FalseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The period in which a server falsely reported that it was idle."""

    server: str
    denied: int
    """number of jobs that the server ran during this period"""


class Callbacks(msgspec.Struct, frozen=True, kw_only=True):
    """Figures about the callbacks, counted by their receiver."""

    expected: int
    delivered: int
    """number of jobs whose callback was accepted"""
    refused: int
    """number of callbacks that were refused once on purpose"""
    forged: int
    """number of callbacks with an invalid signature"""


class DispatchDemoReport(DemoReport, frozen=True, kw_only=True):
    """All figures and checks of a run of the demo."""

    subject: ClassVar[str] = "job"

    backend: str
    seed: int
    models: tuple[ModelReport, ...]
    outcomes: dict[str, int]
    """number of answers to submissions by outcome; after ``no_slots``, the client tried again"""
    resent: int
    """number of jobs submitted a second time on purpose"""
    crash: Crash
    false_report: FalseReport = msgspec.field(name="lie")
    poison: int
    """number of jobs that always fail"""
    reasons: dict[str, int]
    """number of dead letters by reason"""
    callbacks: Callbacks
    held: int
    """number of slots that were still assigned to a job at the end"""
    seconds: float

    @property
    def jobs(self) -> int:
        """Number of jobs of all models."""
        return sum(model.jobs for model in self.models)

    @property
    def checks(self) -> tuple[Check, ...]:
        """All conditions that a correct run fulfils."""
        jobs, done = self.jobs, sum(model.done for model in self.models)
        failed, lost = sum(o.failed for o in self.models), sum(o.lost for o in self.models)
        ledgers = [model.ledger for model in self.models]
        right = done - sum(model.wrong for model in self.models)
        duplicates = sum(model.duplicates for model in self.models)
        calls, crash, false = self.callbacks, self.crash, self.false_report
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
            Check(right == done, f"{right:,} of {done:,} results are as expected"),
            Check(duplicates == 0, f"jobs that ran to completion more than once: {duplicates:,}"),
            Check(
                not any(model.crowded for model in self.models),
                "no server ran more jobs at once than it has slots",
            ),
            Check(
                crash.running > 0 and crash.recovered == crash.running,
                f"{crash.recovered:,} of {crash.running:,} jobs running on {crash.server} when it crashed have ended",
            ),
            Check(
                false.denied > 0,
                f"{false.server} reported that it was idle while it ran {false.denied:,} jobs",
            ),
            Check(
                failed == self.poison,
                f"only the {self.poison:,} jobs that always fail are dead letters",
            ),
            Check(
                calls.delivered == calls.expected and not calls.forged,
                f"{calls.delivered:,} of {calls.expected:,} callbacks delivered, each signed; "
                f"{calls.refused:,} were refused at first",
            ),
            Check(self.held == 0, f"slots that are assigned to a job at the end: {self.held:,}"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        for model, item in zip(fields["models"], self.models, strict=True):
            model["ledger"]["balanced"] = item.ledger.balanced
        return {
            "ok": self.ok,
            "jobs": self.jobs,
            **fields,
            "checks": msgspec.to_builtins(self.checks),
        }

    def tables(self) -> tuple[RenderableType, ...]:
        """Return the table of models and, side by side, the ledger of all models and the counts of the whole run."""
        ledger = sum((model.ledger for model in self.models), Ledger())
        return self._models(), side_by_side(ledger_section(ledger), self._flow())

    def _models(self) -> Table:
        # Use a column for each model, not a row, so that the table fits into a narrow terminal.
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column()
        for model in self.models:
            table.add_column(model.name, justify="right")
        table.add_column("all", justify="right", style="dim")
        table.add_row("answers", *(Text(model.mode, "dim") for model in self.models))
        for title, name, style in _COUNTS:
            counts = [getattr(model, name) for model in self.models]
            cells = [Text(f"{count:,}", style if count else "dim") for count in counts]
            table.add_row(title, *cells, f"{sum(counts):,}")
        for title, name in _WAITS:
            table.add_row(title, *(f"{getattr(model, name):,.2f} s" for model in self.models))
        table.add_row("slots used", *(f"{model.utilisation:.0%}" for model in self.models))
        return table

    def _flow(self) -> Table:
        return section(
            "flow",
            [
                *((f"answered {name}", count) for name, count in self.outcomes.items()),
                ("submitted twice", self.resent),
                ("callbacks delivered", self.callbacks.delivered),
                ("callbacks refused at first", self.callbacks.refused),
                (f"running on {self.crash.server} at its crash", self.crash.running),
            ],
            [
                ("seconds", Text(f"{self.seconds:,.1f}", "bold")),
                ("jobs per second", Text(f"{self.jobs / self.seconds:,.1f}", "bold cyan")),
            ],
        )
