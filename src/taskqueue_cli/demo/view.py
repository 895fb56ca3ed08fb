"""What a run shows while it goes on."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from taskqueue_cli.demo.plan import DemoOptions, DemoPlan
from taskqueue_cli.demo.report import Report, summary
from taskqueue_core.tasks import QueueStats

_INTERVAL_SECONDS = 2.0


class View(Protocol):
    """Hears what happens, in order."""

    def begin(self, options: DemoOptions, plan: DemoPlan) -> None:
        """Say what is going to be done."""
        ...

    def event(self, text: str, style: str = "") -> None:
        """Tell something that happened."""
        ...

    def update(self, stats: QueueStats) -> None:
        """Show where the queue stands."""
        ...

    def comparing(self, count: int) -> None:
        """Show how many results have been compared."""
        ...

    def end(self, report: Report) -> None:
        """Show the account."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def view_for(console: Console) -> View:
    """Return the view that suits a console: live on a terminal, lines now and then elsewhere."""
    return LiveView(console) if console.is_terminal else PlainView(console)


def heading(options: DemoOptions, plan: DemoPlan) -> Text:
    """Return the first lines."""
    return Text.assemble(
        ("taskqueue demo", "bold"),
        f"  {len(plan.files):,} files of {options.path}\n",
        (
            f"backend {options.backend}  ·  worker processes {options.workers}  ·  queue {plan.key}",
            "dim",
        ),
    )


def counts(stats: QueueStats) -> list[tuple[str, int, str]]:
    """Return what is counted, each with the style that it has when it is not zero."""
    ledger = stats.ledger
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


class PlainView:
    """Lines: each event, and the counts every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._last = self._began
        self._files = 0

    def begin(self, options: DemoOptions, plan: DemoPlan) -> None:
        """See `View`."""
        self._files = len(plan.files)
        self._console.print(heading(options, plan), soft_wrap=True)

    def event(self, text: str, style: str = "") -> None:
        """See `View`."""
        elapsed = time.monotonic() - self._began
        self._console.print(Text(f"{elapsed:6.1f} s  {text}", style), soft_wrap=True)

    def update(self, stats: QueueStats) -> None:
        """See `View`."""
        if time.monotonic() - self._last >= _INTERVAL_SECONDS:
            self._last = time.monotonic()
            self.event(" · ".join(f"{name} {count:,}" for name, count, _ in counts(stats)))

    def comparing(self, count: int) -> None:
        """See `View`."""
        if time.monotonic() - self._last >= _INTERVAL_SECONDS:
            self._last = time.monotonic()
            self.event(f"compared {count:,} of {self._files:,} results")

    def end(self, report: Report) -> None:
        """See `View`."""
        self._console.print(summary(report))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing."""


class LiveView:
    """Events as lines, and under them a bar with the counts that changes in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TaskProgressColumn(),
            TextColumn("{task.completed:,} / {task.total:,}"),
            TextColumn("[dim]{task.fields[rate]}"),
            console=console,
            expand=True,
        )
        self._counts = Table.grid(expand=True)
        self._live = Live(console=console, refresh_per_second=12, transient=True)
        self._first: float | None = None

    def begin(self, options: DemoOptions, plan: DemoPlan) -> None:
        """See `View`."""
        self._console.print(heading(options, plan))
        self._console.print()
        self._work = self._bars.add_task("tasks", total=plan.total, rate="")
        self._check = self._bars.add_task("compared", total=len(plan.files), rate="", visible=False)

    def event(self, text: str, style: str = "") -> None:
        """See `View`."""
        elapsed = time.monotonic() - self._began
        self._console.print(Text.assemble((f"{elapsed:6.1f} s  ", "dim"), (text, style)))

    def update(self, stats: QueueStats) -> None:
        """See `View`."""
        ended = stats.ledger.done + stats.ledger.dead
        now = time.monotonic()
        self._first = self._first or now
        rate = f"{ended / (now - self._first):,.0f}/s" if ended and now > self._first else ""
        self._bars.update(self._work, completed=ended, rate=rate)
        table = Table.grid(expand=True)
        cells = counts(stats)
        for _ in cells:
            table.add_column(justify="center")
        table.add_row(*(Text(f"{n:,}", f"bold {style}" if n else "dim") for _, n, style in cells))
        table.add_row(*(Text(name, "dim") for name, _, _ in cells))
        self._counts = table
        self._show()

    def comparing(self, count: int) -> None:
        """See `View`."""
        self._bars.update(self._check, completed=count, visible=True)
        self._show()

    def end(self, report: Report) -> None:
        """See `View`."""
        self._live.stop()
        self._console.print(summary(report))

    def _show(self) -> None:
        self._live.update(Padding(Group(self._bars, "", self._counts), (1, 0, 0, 0)))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the live part away."""
        self._live.stop()
