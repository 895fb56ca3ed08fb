"""The seconds that each area of the tests may take. An area over its budget fails a run on an idle machine."""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

BUDGETS = {
    ("core", "memory", "conformance", "examples", "dev", "docs"): (150, 400),
    ("server", "worker", "remote", "cli", "demo", "security", "deploy"): (160, 400),
    ("redis",): (280, 700),
    ("flow",): (30, 60),
    ("dashboard",): (40, 60),
    ("model", "mutants"): (30, 60),
    ("dispatch",): (170, 400),
    ("spark",): (320, 500),
    ("prefect",): (160, 350),
    ("chaos",): (100, 500),
}
"""Seconds for folders under tests/ that share a budget, added up over three processes on two cores: of the tests of
every day, and of all tests. Other folders have none."""
IDLE = 0.1
"""A machine is idle if no more than this share of its processors is in use when the tests have ended."""
_STAT = Path("/proc/stat")


def busy(seconds: float = 1.0) -> float | None:
    """Return the share of the processors that is in use now; None where the system does not count it."""
    if not _STAT.exists():
        return None
    before = _idle()
    time.sleep(seconds)
    return max(0.0, 1 - (_idle() - before) / seconds / (os.cpu_count() or 1))


def _idle() -> float:
    """Return seconds in which the processors had nothing to do, or waited for a disk."""
    idle, waiting = map(int, _STAT.read_text().split()[4:6])
    return (idle + waiting) / os.sysconf("SC_CLK_TCK")


class Line(NamedTuple):
    """One line of the table."""

    text: str
    over: bool


_lines = pytest.StashKey[list[Line]]()


@pytest.hookimpl(trylast=True)  # when the processes of the tests have ended
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
