"""The progress of a demo run as the view shows it: the slots of each server and the queue of each model."""

from __future__ import annotations

import msgspec
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from taskqueue_cli.demo_frame.report import count_text
from taskqueue_core.capabilities import EndpointInfo
from taskqueue_core.tasks import QueueStats
from taskqueue_dispatch.demo.plan import DemoOptions, DispatchDemoPlan
from taskqueue_dispatch.registry import endpoint_state

_LEGEND = Text.assemble(
    ("■", "cyan"), " runs a job  ", ("▣", "magenta"), " detached  ", ("▲", "bold red"), " overdue  ",
    ("▪", "yellow"), " held for the next job  ", ("□", "dim"), " free",
)  # fmt: skip


def heading(options: DemoOptions, plan: DispatchDemoPlan) -> Text:
    """Return the heading that the view prints when a run begins."""
    models = "  ·  ".join(f"{model.name} ({model.answer_mode})" for model in plan.models.values())
    return Text.assemble(
        ("taskqueue dispatch demo", "bold"),
        f"  {len(plan.jobs):,} jobs, {len(plan.models)} models, {len(plan.machines)} simulated servers\n",
        (f"backend {options.backend}  ·  seed {options.seed}  ·  {models}", "dim"),
    )


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of the jobs of one model."""

    name: str
    jobs: int
    stats: QueueStats

    @property
    def queued(self) -> int:
        """Number of jobs that wait for a slot or for their next attempt."""
        return self.stats.ledger.waiting + self.stats.ledger.scheduled

    @property
    def ended(self) -> int:
        """Number of jobs that are done or have failed."""
        return self.stats.ledger.done + self.stats.ledger.dead


class JobsProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The slots and queues of a run at one moment."""

    endpoints: tuple[EndpointInfo, ...]
    """endpoints of the run, sorted by server; models are named as in the plan"""
    models: tuple[ModelRow, ...]
    now: float
    callbacks: int = 0
    """number of callbacks delivered so far"""

    @property
    def ended(self) -> int:
        """Number of jobs of all models that are done or have failed."""
        return sum(model.ended for model in self.models)

    @property
    def busy(self) -> int:
        """Number of slots with a running job."""
        return sum(info.assigned + info.detached for info in self.endpoints)

    def render(self) -> RenderableType:
        """Return a row of slots for each server, and a bar with counts for each model."""
        slots = Table.grid(padding=(0, 2))
        for info in self.endpoints:
            state = endpoint_state(info, self.now)[0]
            shown = Text("" if state == "ready" else state, "red")
            slots.add_row(
                Text(info.endpoint.server, "bold"), Text(info.endpoint.model), _marks(info), shown
            )
        models = Table.grid(padding=(0, 2))
        for name in ("", "", "ended", "queued", "retried", "redelivered", "failed"):
            models.add_column(Text(name, "dim"), justify="left" if not name else "right")
        models.show_header = True
        for model in self.models:
            style = "green" if model.ended >= model.jobs else "cyan"
            bar = ProgressBar(
                model.jobs, model.ended, 20, complete_style=style, finished_style=style
            )
            models.add_row(
                Text(model.name, "bold"),
                bar,
                f"{model.ended:,} / {model.jobs:,}",
                count_text(model.queued, "yellow"),
                count_text(model.stats.retried, "yellow"),
                count_text(model.stats.redelivered, "magenta"),
                count_text(model.stats.ledger.dead, "red"),
            )
        callbacks = Text.assemble(
            ("callbacks delivered  ", "dim"), count_text(self.callbacks, "green")
        )
        return Group(slots, "", _LEGEND, "", models, callbacks)

    def line(self) -> str:
        """Return the counts of each model, and the number of busy slots, as one line."""
        models = " · ".join(
            f"{model.name} {model.ended:,}/{model.jobs:,}, {model.queued:,} queued"
            for model in self.models
        )
        return f"{models} · busy slots: {self.busy} · callbacks: {self.callbacks:,}"


def _marks(info: EndpointInfo) -> Text:
    """Return one mark for each slot of an endpoint."""
    overdue = min(info.overdue, info.assigned + info.detached)
    assigned = max(0, info.assigned - overdue)
    return Text.assemble(
        ("■" * assigned, "cyan"),
        ("▣" * (info.assigned + info.detached - overdue - assigned), "magenta"),
        ("▲" * overdue, "bold red"),
        ("▪" * info.unassigned, "yellow"),
        ("□" * info.free, "dim"),
    )
