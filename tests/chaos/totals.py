"""Totals over all seeded runs, kept in a file so that a campaign continues where the last one stopped."""

from __future__ import annotations

import fcntl
import os
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.chaos.checker import Spread
from tests.chaos.nemesis import Fault
from tests.chaos.seeded import Report, Scenario

_HERE = Path(__file__).parent
TOTALS = _HERE / "results" / "totals.json"
REGRESSIONS = _HERE / "regressions.toml"


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A run that broke a rule."""

    seed: int
    menu: str
    rules: dict[str, int]


class Totals(msgspec.Struct, kw_only=True):
    """Sums and worst values over all runs. Times are in seconds."""

    next_seed: int = 1
    runs: int = 0
    tasks: int = 0
    deliveries: int = 0
    faults: dict[str, int] = {}
    unknown: int = 0
    """number of publishes that were never answered, and may or may not have taken effect"""
    duplicates: int = 0
    held: int = 0
    """number of deliveries in the hands of processes that were killed, frozen or cut off"""
    stale: int = 0
    lost: int = 0
    waived: int = 0
    redelivery: dict[str, Spread] = {}
    """worst value and worst 99th percentile of any run, by what happened to the holder"""
    recovery: Spread = Spread()
    publishing: Spread = Spread()
    wall: float = 0.0
    failed: list[Failed] = []
    python: str = ""
    redis: str = ""

    def add(self, report: Report, redis: str) -> None:
        """Add the result of one run."""
        figures = report.figures
        self.runs += 1
        for name in (
            "tasks",
            "deliveries",
            "unknown",
            "duplicates",
            "held",
            "stale",
            "lost",
            "waived",
        ):
            setattr(self, name, getattr(self, name) + getattr(figures, name))
        self.faults = dict(sorted((Counter(self.faults) + Counter(figures.faults)).items()))
        for cause, spread in figures.redelivery.items():
            self.redelivery[cause] = _worse(self.redelivery.get(cause, Spread()), spread)
        self.recovery = _worse(self.recovery, figures.recovery)
        self.publishing = _worse(self.publishing, figures.publishing)
        self.wall += report.wall
        self.python, self.redis = platform.python_version(), redis
        if not report.ok:
            told = report.scenario
            self.failed.append(Failed(seed=told.seed, menu=told.menu, rules=report.rules))


def _worse(one: Spread, two: Spread) -> Spread:
    return Spread(one.count + two.count, max(one.p99, two.p99), max(one.worst, two.worst))


def read_totals(path: Path = TOTALS) -> Totals:
    """Return the totals so far."""
    return msgspec.json.decode(path.read_bytes(), type=Totals) if path.exists() else Totals()


@contextmanager
def updated(path: Path = TOTALS) -> Iterator[Totals]:
    """Yield the totals for changes and save them atomically; other campaigns wait meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        totals = read_totals(path)
        yield totals
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(totals), indent=2) + b"\n")
        fresh.replace(path)
    finally:
        os.close(lock)


def reset(path: Path = TOTALS) -> None:
    """Reset the totals, but keep the next seed so that no seed is used twice."""
    with updated(path) as totals:
        for name, value in msgspec.structs.asdict(Totals(next_seed=totals.next_seed)).items():
            setattr(totals, name, value)


def _point(fault: Fault) -> str:
    """Return the point of a fault as a member of a table."""
    return f', point = "{fault.point}"' if fault.point else ""


def add_regression(report: Report, path: Path = REGRESSIONS) -> None:
    """Append a failed run to the list that the tests replay, unless it is listed already."""
    told = report.scenario
    known = {(row.seed, row.menu) for row in read_regressions(path)}
    if (told.seed, told.menu) in known:
        return
    why = report.violations[0].replace("\\", "").replace('"', "'")
    lines = ["", "[[run]]", f"seed = {told.seed}", f'menu = "{told.menu}"', f'why = "{why[:200]}"']
    lines.append("faults = [")
    lines += [
        f'    {{ kind = "{fault.kind}", target = "{fault.target}", number = {fault.number}, '
        f"start = {fault.start}, length = {fault.length}{_point(fault)} }},"
        for fault in told.faults
    ]
    lines.append("]")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


class _Row(msgspec.Struct):
    run: list[Scenario] = []


def read_regressions(path: Path = REGRESSIONS) -> list[Scenario]:
    """Return the runs that failed in the past."""
    return msgspec.toml.decode(path.read_bytes(), type=_Row).run if path.exists() else []
