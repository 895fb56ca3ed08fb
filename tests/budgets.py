"""Time budgets per test area, in seconds. On an idle machine, the run fails if an area exceeds its budget."""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

BUDGETS = {
    ("core", "memory", "conformance", "examples", "dev", "docs"): (150, 760),
    ("server", "worker", "remote", "cli", "demo", "security", "deploy"): (160, 680),
    ("redis",): (280, 850),
    ("flow",): (30, 90),
    ("dashboard",): (40, 60),
    ("model", "mutants"): (30, 60),
    ("dispatch",): (170, 450),
    ("spark",): (320, 900),
    ("prefect",): (160, 640),
    ("chaos",): (100, 520),
}
"""Budgets in seconds: for the everyday tests, and for all tests. Folders of one entry share its budget. Times are
summed over three processes on two cores. Folders that are not listed have no budget."""
IDLE = 0.1
"""The machine counts as idle if at most this share of its CPU time is in use after the tests have ended."""
_STAT = Path("/proc/stat")


def busy(seconds: float = 1.0) -> float | None:
    """Return the share of CPU time in use, measured now over ``seconds``; None if the system does not report it."""
    if not _STAT.exists():
        return None
    before = _idle()
    time.sleep(seconds)
    return max(0.0, 1 - (_idle() - before) / seconds / (os.cpu_count() or 1))


def _idle() -> float:
    """Return the CPU seconds spent idle or waiting for a disk since boot."""
    idle, waiting = map(int, _STAT.read_text().split()[4:6])
    return (idle + waiting) / os.sysconf("SC_CLK_TCK")


class Line(NamedTuple):
    """One line of the printed table of times and budgets."""

    text: str
    over: bool


_lines = pytest.StashKey[list[Line]]()


@pytest.hookimpl(trylast=True)  # after the xdist worker processes have ended
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
    if any(line.over for line in found):
        share = busy()
        idle = share is not None and share <= IDLE
        if idle and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        verdict = "fails the run" if idle else "does not fail the run: the machine has other work"
        found.append(Line(f"An area is over its budget. This {verdict}.", over=True))
    config.stash[_lines] = found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time of each area and its budget."""
    found = terminalreporter.config.stash.get(_lines, [])
    if found:
        terminalreporter.section("seconds by area")
    for line in found:
        terminalreporter.write_line(line.text, red=line.over, bold=line.over)


def seconds_by_area(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Return the total seconds of set-up, call and tear-down, by top-level folder under tests/."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        folders = report.nodeid.partition("::")[0].split("/")[:-1]
        if folders[:1] == ["tests"]:
            seconds["/".join(folders[1:2])] += report.duration
    return seconds


def lines(seconds: dict[str, float], *, everything: bool) -> Iterator[Line]:
    """Yield a line for each budget of which tests have run, and for each area without a budget."""
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
