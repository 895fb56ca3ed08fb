"""The display of a demo run in progress: progress bars and the counts of the queue."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from taskqueue_cli.demo.plan import DemoOptions, DemoPlan
from taskqueue_cli.demo_frame.report import count_text
from taskqueue_core.tasks import Ledger, QueueStats, State

_BAR_COLUMNS = (
    TextColumn("{task.description:>9}"),
    BarColumn(None, complete_style="cyan", finished_style="green"),
    TextColumn("{task.percentage:>3.0f}%", "magenta"),
    TextColumn("{task.completed:,} / {task.total:,}"),
    TextColumn("{task.fields[rate]}", "dim"),
)


def heading(options: DemoOptions, plan: DemoPlan) -> Text:
    """Return the heading that is printed when a run begins."""
    settings = (
        f"backend {options.backend}  ·  worker processes {options.workers}  ·  queue {plan.key}"
    )
    return Text.assemble(
        ("taskqueue demo", "bold"),
        f"  {options.path} (files: {len(plan.files):,})\n",
        (settings, "dim"),
    )


def count_ended(stats: QueueStats) -> int:
    """Return the number of tasks that have ended, with or without success."""
    return sum(getattr(stats.ledger, state.value) for state in State if not state.live)


class JobProgress:
    """The current counts of the queue, and the number of results compared so far."""

    def __init__(self, plan: DemoPlan) -> None:
        self._plan = plan
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
        bars = Progress(*_BAR_COLUMNS, expand=True)
        ended = count_ended(self._stats)
        bars.add_task("tasks", total=self._plan.total, completed=ended, rate=self._rate)
        if self.compared is not None:
            bars.add_task("compared", total=len(self._plan.files), completed=self.compared, rate="")
        cells = self._counts()
        counts = Table.grid(*(Column(justify="center") for _ in cells), expand=True)
        counts.add_row(*(count_text(number, style) for _, number, style in cells))
        counts.add_row(*(Text(name, "dim") for name, _, _ in cells))
        return Group(bars.make_tasks_table(bars.tasks), "", counts)

    def line(self) -> str:
        if self.compared is not None:
            return f"compared {self.compared:,} of {len(self._plan.files):,} results"
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
