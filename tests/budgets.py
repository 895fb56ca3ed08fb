"""Time budgets per test area, in seconds. The table at the end of a run marks areas over their budget.

Only with the option ``--budgets`` does such an area fail the run: seconds also depend on the machine and on its other
work during the whole run, which no measurement of the tests can tell apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

BUDGETS = {
    ("core", "memory", "conformance", "examples", "dev", "docs"): (150, 420),
    ("server", "worker", "remote", "cli", "demo", "security", "deploy"): (160, 700),
    ("redis",): (280, 690),
    ("flow",): (30, 95),
    ("dashboard",): (40, 60),
    ("model", "mutants"): (30, 65),
    ("dispatch",): (170, 290),
    ("spark",): (320, 1000),
    ("prefect",): (160, 570),
    ("chaos",): (100, 490),
    ("application",): (100, 115),
}
"""Budgets in seconds: for the everyday tests, and for all tests. Folders of one entry share its budget. Times are
summed over three processes on two cores. Folders that are not listed have no budget."""


class Line(NamedTuple):
    """One line of the printed table of times and budgets."""

    text: str
    over: bool


_lines = pytest.StashKey[list[Line]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that makes budgets count."""
    parser.addoption(
        "--budgets", action="store_true", help="fail if an area takes longer than its budget"
    )


@pytest.hookimpl(trylast=True)  # after the xdist worker processes have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Compare the time of each area with its budget; with ``--budgets``, an area over its budget fails the run."""
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
        fails = config.getoption("--budgets")
        if fails and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        verdict = "fails the run" if fails else "fails the run only with --budgets"
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
