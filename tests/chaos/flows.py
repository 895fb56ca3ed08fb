"""A campaign of workflows and schedules: for each kind of fault, a number of seeded runs, counted in a table."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from tests.chaos.nemesis import WORKFLOWS
from tests.chaos.seeded import Report, carry_out, scenario

SEEDS = 20
RESULTS = Path(__file__).parent / "results" / "workflows.json"
_WORDS = {
    "manifest": "SIGKILL of a publisher or server between the manifest of a workflow and its steps",
    "adding": "SIGKILL of a worker before or after it stores the steps that a handler has added",
    "process": "SIGKILL of the child process of a handler, or of its worker, also around such a call",
    "release": "SIGKILL of a server between the end of a parent and the release of its children",
    "outbox": "SIGKILL of Redis between a line of the outbox and its delivery",
    "schedules": "three servers fire the same schedules, and some of them are killed",
    "clock": "the clock of one of three servers is an hour off",
    "zones": "both changes of the clock in five time zones, with servers or Redis killed at the same time",
    "full": "the queue of a schedule is full at the instant",
    "held": "redrive and discard of dead letters that hold other tasks",
    "shards": "the number of shards changes while tasks are blocked",
    "migration": "the store is replaced by another one while tasks are blocked",
}


class Row(msgspec.Struct, kw_only=True):
    """The sums over all runs of a kind."""

    kind: str
    runs: int = 0
    steps: int = 0
    releases: int = 0
    instants: int = 0
    faults: int = 0
    lost: int = 0
    doubled: int = 0
    again: int = 0
    """number of deliveries that came again because their holder was killed or cut off"""
    failed: list[int] = []
    """seeds of the runs that broke a rule"""

    def add(self, report: Report) -> None:
        """Add the result of one run."""
        figures = report.figures
        self.runs += 1
        self.steps += figures.flows.steps
        self.releases += figures.flows.releases
        self.instants += figures.flows.instants
        self.faults += sum(figures.faults.values())
        self.lost += figures.lost
        self.doubled += figures.flows.doubled
        self.again += figures.duplicates
        if not report.ok:
            self.failed.append(report.scenario.seed)

    def save(self, path: Path) -> None:
        """Replace the row of this kind in a file of results."""
        rows = {one.kind: one for one in read(path)} | {self.kind: self}
        ordered = [rows[kind] for kind in WORKFLOWS if kind in rows]
        path.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n")


def campaign(
    seeds: int, jobs: int = 2, kinds: Sequence[str] = (), path: Path = RESULTS
) -> Iterator[Report]:
    """Run the seeds of each kind, by default of all kinds, and save the results after each run."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=10) as pool:
        for kind in kinds or WORKFLOWS:
            row = Row(kind=kind)
            runs = [pool.submit(carry_out, scenario(seed, kind)) for seed in range(seeds)]
            for one in as_completed(runs):
                report = one.result()
                row.add(report)
                row.save(path)
                yield report


def read(path: Path = RESULTS) -> list[Row]:
    """Return the results of the last campaign of each kind."""
    return msgspec.json.decode(path.read_bytes(), type=list[Row]) if path.exists() else []


def table(path: Path = RESULTS) -> str:
    """Return the results as a Markdown table."""
    names = ("runs", "faults", "steps", "releases", "instants", "lost", "doubled", "again")
    lines = [
        "| fault | runs | faults | steps | released | instants | lost | done twice | delivered again | broke a rule |",
        f"| --- |{' --- |' * (len(names) + 1)}",
    ]
    for row in read(path):
        values = " | ".join(f"{getattr(row, name):,}" for name in names)
        lines.append(f"| {_WORDS[row.kind]} | {values} | {len(row.failed)} |")
    return "\n".join(lines) + "\n"
