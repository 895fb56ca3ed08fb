"""The seconds that each area of the tests may take, and how busy other processes kept the machine meanwhile.

An area over its budget fails a run on a machine that had nothing else to do.
"""

import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

BUDGETS = {
    ("core", "memory", "conformance", "examples", "dev", "docs"): (150, 300),
    ("server", "worker", "remote", "cli", "demo"): (300, 400),
    ("redis",): (270, 500),
    ("flow",): (60, 60),
    ("dashboard",): (60, 60),
    ("model", "mutants"): (60, 60),
    ("dispatch",): (300, 400),
    ("spark",): (430, 600),
    ("prefect",): (450, 600),
    ("chaos",): (240, 400),
}
"""Seconds for folders under tests/ that share a budget, added up over three processes on two cores: of the tests of
every day, and of all tests. Other folders have none."""
IDLE = 0.1
"""A machine is idle if other processes take no more than this share of its processors."""
_STAT = Path("/proc/stat")


class Usage(NamedTuple):
    """Seconds since some moment in the past."""

    clock: float
    machine: float
    """of its processors, used by any process"""
    own: float
    """of its processors, used by this process and those of its children that have ended"""

    @classmethod
    def now(cls) -> "Usage | None":
        """Read the clocks; None where the system does not count what all processes use."""
        if not _STAT.exists():
            return None
        user, nice, system, _, _, irq, softirq, steal, *_ = map(
            int, _STAT.read_text().split()[1:11]
        )
        machine = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        times = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        return cls(time.monotonic(), machine, sum(it.ru_utime + it.ru_stime for it in times))

    def others(self, since: "Usage") -> float:
        """Return the share of the machine that other processes have taken, from 0 to 1."""
        spent = (self.machine - since.machine) - (self.own - since.own)
        return max(0.0, spent / (self.clock - since.clock) / (os.cpu_count() or 1))


class Line(NamedTuple):
    """One line of the table."""

    text: str
    over: bool


_start = pytest.StashKey[Usage | None]()
_lines = pytest.StashKey[list[Line]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note when the run began."""
    session.config.stash[_start] = Usage.now()


@pytest.hookimpl(
    trylast=True
)  # when the processes of the tests have ended, so that theirs are counted
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if an area is over its budget and the machine was idle."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    reports = [
        report
        for group in reporter.stats.values()
        for report in group
        if isinstance(report, pytest.TestReport)
    ]
    found = list(
        lines(seconds_by_area(reports), everything="not long" not in config.option.markexpr)
    )
    start, end = config.stash[_start], Usage.now()
    others = end.others(start) if start and end else None
    if any(line.over for line in found):
        idle = others is not None and others <= IDLE
        if idle and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        verdict = (
            "this fails the run" if idle else "the machine was not idle, so this fails nothing"
        )
        found.append(Line(f"An area is over its budget: {verdict}.", over=True))
    if found and others is not None:
        found.append(Line(f"Other processes took {others:.0%} of the processors.", over=False))
    config.stash[_lines] = found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    found = terminalreporter.config.stash.get(_lines, [])
    if found:
        terminalreporter.section("seconds by area")
    for line in found:
        terminalreporter.write_line(line.text, red=line.over, bold=line.over)


def seconds_by_area(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Return the seconds of set-up, call and tear-down of all tests by top-level folder under tests/."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        folders = report.nodeid.partition("::")[0].split("/")[:-1]
        if folders[:1] == ["tests"]:
            seconds["/".join(folders[1:2])] += report.duration
    return seconds


def lines(seconds: dict[str, float], *, everything: bool) -> Iterator[Line]:
    """Give a line for each budget that was used and each area without one."""
    rest = dict(seconds)
    for areas, budgets in BUDGETS.items():
        used = [area for area in areas if area in rest]
        if used:
            spent, budget = sum(rest.pop(area) for area in used), budgets[everything]
            over = spent > budget
            note = f"OVER by {spent - budget:.1f} s" if over else ""
            yield Line(
                f"{' + '.join(used):<32}{spent:8.1f} s of {budget:4} s  {note}".rstrip(), over
            )
    for area in sorted(rest):
        yield Line(f"{area or 'tests':<32}{rest[area]:8.1f} s", over=False)
