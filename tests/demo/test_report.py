"""The report of the demonstration: it detects every error and shows it in each output form."""

import io
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from taskqueue_cli.demo.check import Comparison
from taskqueue_cli.demo.plan import DemoOptions, DemoPlan, make_plan
from taskqueue_cli.demo.progress import JobProgress, heading
from taskqueue_cli.demo.report import Killed, Report
from taskqueue_cli.demo_frame.view import view_for
from taskqueue_core.tasks import DeadLetter, Ledger, QueueStats, Task


def dead(task_id: str, reason: str = "max_retries_exceeded") -> DeadLetter:
    """Return a dead letter."""
    return DeadLetter(
        task=Task(key="k", id=task_id), attempt=3, losses=0, reason=reason, failed_at=1.0
    )


@pytest.fixture
def plan(tmp_path: Path) -> DemoPlan:
    """A plan with three files, one of which fails once."""
    for name in "abc":
        (tmp_path / name).touch()
    return make_plan(tmp_path, None)


@pytest.fixture
def report(plan: DemoPlan) -> Report:
    """The report of a run without errors."""
    ledger = Ledger(published=4, done=3, dead=1)
    return Report(
        plan=plan,
        backend="b",
        workers=2,
        stats=QueueStats(
            key=plan.key, ledger=ledger, delivered=9, retried=3, redelivered=2, lost=2
        ),
        duplicates=2,
        resent=2,
        killed=Killed(worker="worker-1", pid=1, held=2, replacement="worker-3"),
        comparison=Comparison(compared=3),
        dead=(dead(plan.poison_id),),
        seconds=2.0,
    )


def test_a_run_in_which_everything_holds(report: Report) -> None:
    """For a run without errors, all checks hold, and the report contains the numbers of the run."""
    assert report.ok
    told = report.to_dict()
    assert (told["ok"], told["tasks_per_second"], told["ledger"]["balanced"]) == (True, 2.0, True)


@pytest.mark.parametrize(
    "change",
    [
        {"ledger": {"published": 5}},
        {"ledger": {"published": 3, "done": 2}},
        {"ledger": {"published": 5, "dead": 2}},
        {"ledger": {"waiting": 1, "done": 2}},
        {"stats": {"lost": 0, "redelivered": 0}},
        {"stats": {"retried": 2}},
        {"comparison": Comparison(compared=3, mismatches=("a",))},
        {"comparison": Comparison(compared=2)},
        {"duplicates": 1},
        {"dead": ()},
        {"dead": (dead("other"),)},
        {"dead": "wrong reason"},
    ],
)
def test_whatever_does_not_hold_is_seen(change: dict[str, Any], report: Report) -> None:
    """C26: if a task was lost, duplicated, wrong or given up, the report shows a failed check."""
    stats = report.stats
    if "ledger" in change:
        ledger = msgspec.structs.replace(stats.ledger, **change["ledger"])
        change = {"stats": msgspec.structs.replace(stats, ledger=ledger)}
    elif "stats" in change:
        change = {"stats": msgspec.structs.replace(stats, **change["stats"])}
    elif change.get("dead") == "wrong reason":
        change = {"dead": (dead(report.plan.poison_id, "rejected"),)}
    changed = msgspec.structs.replace(report, **change)
    assert not changed.ok
    assert not changed.to_dict()["ok"]
    text = shown(changed)
    assert "✘" in text
    assert "A check failed" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_person_sees_every_step(terminal: bool, report: Report) -> None:  # noqa: FBT001
    """On a terminal and elsewhere, the output contains the events, the ledger and the verdict."""
    text = shown(report, terminal=terminal)
    for words in ("(files: 3)", "worker-1 killed", "published", "Every task is accounted for."):
        assert words in text
    assert text.count("✔") == len(report.checks) + 1


def test_oddities_are_reported(report: Report) -> None:
    """The output names files with wrong results, and counts changed and unreadable files."""
    comparison = Comparison(compared=3, mismatches=("/x/wrong.py",), changed=1, unreadable=1)
    text = shown(msgspec.structs.replace(report, comparison=comparison))
    for words in ("/x/wrong.py", "changed during the run: 1", "the check could read: 1"):
        assert words in text


def test_a_terminal_shows_bars_and_counts(report: Report) -> None:
    """On a terminal, progress bars show the tasks and later the comparison, together with the counts of the queue."""
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system=None)
    progress = JobProgress(report.plan)
    progress.update(report.stats)
    with console.capture() as capture:
        console.print(progress.render())
    assert re.search("tasks [━╸╺]+ +100% 4 / 4", capture.get())
    assert "compared" not in capture.get()
    progress.compared = 1
    with console.capture() as capture:
        console.print(progress.render())
    assert re.search("compared [━╸╺]+ +33% 1 / 3", capture.get())
    assert re.search("published +waiting +scheduled +in flight +done", capture.get())


def shown(report: Report, *, terminal: bool = False) -> str:
    """Return the output of a run."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    options = DemoOptions(path=Path("/x"), backend="b")
    view, progress = view_for(console), JobProgress(report.plan)
    with view.begin(heading(options, report.plan)):
        progress.update(report.stats)
        view.update(progress)
        view.event("worker-1 killed", "red")
        progress.compared = 3
        view.update(progress)
        view.end(report)
    return file.getvalue()
