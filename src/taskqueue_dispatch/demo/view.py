"""What a run shows while it goes on."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from taskqueue_core.capabilities import EndpointInfo, PoolView
from taskqueue_core.tasks import Ledger
from taskqueue_dispatch.demo.plan import DemoOptions, DispatchDemoPlan
from taskqueue_dispatch.demo.report import DispatchDemoReport, summary


class SlotRow(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of one endpoint, by state. Their sum may be more than its slots where some were taken away."""

    model: str
    server: str
    free: int
    unassigned: int = 0
    running: int = 0
    detached: int = 0
    overdue: int = 0
    state: str = ""
    """why it gets no jobs; nothing where it does"""


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one model."""

    name: str
    jobs: int
    ledger: Ledger
    retried: int = 0
    redelivered: int = 0

    @property
    def queued(self) -> int:
        """Those that wait, for a slot or for their next attempt."""
        return self.ledger.waiting + self.ledger.scheduled

    @property
    def ended(self) -> int:
        """Those that are done or have failed."""
        return self.ledger.done + self.ledger.dead


class SlotTable(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    rows: tuple[SlotRow, ...]
    lines: tuple[ModelRow, ...]
    callbacks: int = 0
    """delivered so far"""


def _row_of(info: EndpointInfo, name: str, now: float) -> SlotRow:
    """Return the slots of an endpoint. ``name`` is its model's, as it is shown."""
    overdue = min(info.overdue, info.assigned)
    return SlotRow(
        model=name,
        server=info.endpoint.server,
        free=info.free,
        unassigned=info.unassigned,
        running=info.assigned - overdue,
        detached=info.detached,
        overdue=overdue,
        state=state_of(info, now),
    )


def state_of(info: EndpointInfo, now: float) -> str:
    """Return why an endpoint gets no jobs, in a word: nothing where it does."""
    if info.removed:
        return "removed"
    if info.draining:
        return "draining"
    if not info.healthy:
        return "not healthy"
    if info.resting_until is not None and info.resting_until > now:
        return "resting"
    return ""


def racks_of(view: PoolView, names: dict[str, str], now: float) -> tuple[SlotRow, ...]:
    """Return the endpoints of models, by the server's name."""
    rows = [
        _row_of(info, names[info.endpoint.model], now)
        for info in view.endpoints
        if info.endpoint.model in names
    ]
    return tuple(sorted(rows, key=lambda row: (row.server, row.model)))


_EVERY = 2.0
_BAR = 20
_LEGEND = Text.assemble(
    ("■", "cyan"), " runs a job  ", ("▣", "magenta"), " runs by itself  ", ("▲", "red"),
    " overdue  ", ("▪", "yellow"), " held for the next job  ", ("□", "dim"), " free",
)  # fmt: skip


class View(Protocol):
    """Hears what happens, in order."""

    def begin(self, options: DemoOptions, plan: DispatchDemoPlan) -> None:
        """Say what is going to be done."""
        ...

    def event(self, text: str, style: str = "") -> None:
        """Tell something that happened."""
        ...

    def update(self, board: SlotTable) -> None:
        """Show slots and queues."""
        ...

    def end(self, report: DispatchDemoReport) -> None:
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


def heading(options: DemoOptions, plan: DispatchDemoPlan) -> Text:
    """Return the first lines."""
    models = "  ·  ".join(f"{model.name} ({model.answer_mode})" for model in plan.models)
    return Text.assemble(
        ("taskqueue dispatch demo", "bold"),
        f"  {len(plan.jobs):,} jobs, {len(plan.models)} models, {len(plan.machines)} simulated servers\n",
        (f"backend {options.backend}  ·  seed {options.seed}  ·  {models}", "dim"),
    )


def slots(row: SlotRow) -> Text:
    """Return one mark for each slot of an endpoint."""
    return Text.assemble(
        ("■" * row.running, "cyan"),
        ("▣" * row.detached, "magenta"),
        ("▲" * row.overdue, "bold red"),
        ("▪" * row.unassigned, "yellow"),
        ("□" * row.free, "dim"),
    )


class PlainView:
    """Lines: each event, and the counts every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._last = self._began

    def begin(self, options: DemoOptions, plan: DispatchDemoPlan) -> None:
        """See `View`."""
        self._console.print(heading(options, plan), soft_wrap=True)

    def event(self, text: str, style: str = "") -> None:
        """See `View`."""
        elapsed = time.monotonic() - self._began
        self._console.print(Text(f"{elapsed:6.1f} s  {text}", style), soft_wrap=True)

    def update(self, board: SlotTable) -> None:
        """See `View`."""
        if time.monotonic() - self._last < _EVERY:
            return
        self._last = time.monotonic()
        busy = sum(row.running + row.detached for row in board.rows)
        lines = " · ".join(
            f"{line.name} {line.ended:,}/{line.jobs:,}, {line.queued:,} queued"
            for line in board.lines
        )
        self.event(f"{lines} · {busy} slots busy · {board.callbacks:,} callbacks")

    def end(self, report: DispatchDemoReport) -> None:
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
    """Events as lines, and under them the slots and the queues, which change in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=12, transient=True)

    def begin(self, options: DemoOptions, plan: DispatchDemoPlan) -> None:
        """See `View`."""
        self._console.print(heading(options, plan))
        self._console.print()

    def event(self, text: str, style: str = "") -> None:
        """See `View`."""
        elapsed = time.monotonic() - self._began
        self._console.print(Text.assemble((f"{elapsed:6.1f} s  ", "dim"), (text, style)))

    def update(self, board: SlotTable) -> None:
        """See `View`."""
        self._live.update(Padding(_board(board), (1, 0, 0, 0)))

    def end(self, report: DispatchDemoReport) -> None:
        """See `View`."""
        self._live.stop()
        self._console.print(summary(report))

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


def _board(board: SlotTable) -> RenderableType:
    text = Text.assemble(("callbacks delivered  ", "dim"), _count(board.callbacks, "green"))
    return Group(_racks(board), "", _LEGEND, "", _lines(board), text)


def _racks(board: SlotTable) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in board.rows:
        table.add_row(Text(row.server, "bold"), row.model, slots(row), Text(row.state, "red"))
    return table


def _lines(board: SlotTable) -> Table:
    table = Table.grid(padding=(0, 2))
    for name in ("", "", "ended", "queued", "retried", "redelivered", "failed"):
        table.add_column(Text(name, "dim"), justify="left" if not name else "right")
    table.show_header = True
    for line in board.lines:
        table.add_row(Text(line.name, "bold"), _bar(line), *_counts(line))
    return table


def _bar(line: ModelRow) -> ProgressBar:
    style = "green" if line.ended >= line.jobs else "cyan"
    return ProgressBar(line.jobs, line.ended, _BAR, complete_style=style, finished_style=style)


def _counts(line: ModelRow) -> tuple[Text, ...]:
    return (
        Text(f"{line.ended:,} / {line.jobs:,}"),
        _count(line.queued, "yellow"),
        _count(line.retried, "yellow"),
        _count(line.redelivered, "magenta"),
        _count(line.ledger.dead, "red"),
    )


def _count(number: int, style: str) -> Text:
    return Text(f"{number:,}", f"bold {style}" if number else "dim")
