"""The display of a demo run in progress: progress bars and the counts of the queue."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from taskqueue_cli.demo.plan import DemoOptions, DemoPlan
from taskqueue_cli.demo_frame.report import count_text
from taskqueue_core.tasks import Ledger, QueueStats, State


def heading(options: DemoOptions, plan: DemoPlan) -> Text:
    """Return the heading that is printed when a run begins."""
    settings = (
        f"backend {options.backend}  ·  worker processes {options.workers}  ·  queue {plan.key}"
    )
    return Text.assemble(
        ("taskqueue demo", "bold"),
        f"  {len(plan.files):,} files of {options.path}\n",
        (settings, "dim"),
    )


def count_ended(stats: QueueStats) -> int:
    """Return the number of tasks that have ended, with or without success."""
    return sum(getattr(stats.ledger, state.value) for state in State if not state.live)


class JobProgress:
    """The current counts of the queue, and the number of results compared so far."""

    def __init__(self, plan: DemoPlan) -> None:
        self._total = plan.total
        self._files = len(plan.files)
        self._began = time.monotonic()
        self._stats = QueueStats(key=plan.key, ledger=Ledger())
        self._rate = ""
        self.compared: int | None = None
        """number of results compared so far; None before the comparison begins"""

    def update(self, stats: QueueStats) -> None:
        """Replace the counts of the queue, and compute the rate at which tasks end."""
        self._stats = stats
        if ended := count_ended(stats):
            self._rate = f"{ended / (time.monotonic() - self._began):,.0f}/s"

    def render(self) -> RenderableType:
        """Return a progress bar for the tasks, one for the comparison of results, and the counts below."""
        columns = [
            Column(no_wrap=name != "bar") for name in ("name", "bar", "share", "count", "rate")
        ]
        bars = Table.grid(*columns, padding=(0, 1), expand=True)
        _add_bar(bars, "tasks", count_ended(self._stats), self._total, self._rate)
        if self.compared is not None:
            _add_bar(bars, "compared", self.compared, self._files)
        counts = Table.grid(expand=True)
        cells = self._counts()
        for _ in cells:
            counts.add_column(justify="center")
        counts.add_row(*(count_text(number, style) for _, number, style in cells))
        counts.add_row(*(Text(name, "dim") for name, _, _ in cells))
        return Group(bars, "", counts)

    def line(self) -> str:
        """Return the counts as one line, or during the comparison the number of results compared."""
        if self.compared is not None:
            return f"compared {self.compared:,} of {self._files:,} results"
        return " · ".join(f"{name} {number:,}" for name, number, _ in self._counts())

    def _counts(self) -> list[tuple[str, int, str]]:
        stats, ledger = self._stats, self._stats.ledger
        return [
            ("published", ledger.published, ""),
            ("waiting", ledger.waiting, ""),
            ("scheduled", ledger.scheduled, "yellow"),
            ("in flight", ledger.in_flight, "cyan"),
            ("done", ledger.done, "green"),
            ("retried", stats.retried, "yellow"),
            ("redelivered", stats.redelivered, "magenta"),
            ("lost", stats.lost, "magenta"),
            ("dead", ledger.dead, "red"),
        ]


def _add_bar(bars: Table, name: str, completed: int, total: int, rate: str = "") -> None:
    bars.add_row(
        f"{name:>9}",
        ProgressBar(total, completed, complete_style="cyan", finished_style="green"),
        Text(f"{completed / total:>4.0%}", "magenta"),
        f"{completed:,} / {total:,}",
        Text(rate, "dim"),
    )
