"""The order of the tests, and the seconds that each area takes, against the budget that keeps the whole quick."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

FIRST = "tests/spark/"
#: Seconds for the folders under tests/ that share a budget, of three processes on two cores: all of it takes less than
#: a quarter of an hour. Other folders have none.
BUDGETS = {
    ("core", "memory", "conformance", "examples", "dev", "docs"): 150,
    ("server", "worker", "remote", "cli", "demo"): 300,
    ("redis",): 270,
    ("flow",): 60,
    ("dashboard",): 60,
    ("model", "mutants"): 60,
    ("dispatch",): 300,
    ("spark",): 430,
    ("prefect",): 450,
    ("chaos",): 240,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests on Spark first, and leaves the others in their order.

    Of the processes the first begins there, and what others take over from it is at the end: one Java is started
    and gets warm, not three.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def seconds_by_area(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Set-up, call and tear-down of every test, added up by top-level folder under tests/."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        folders = report.nodeid.split("::")[0].split("/")[:-1]
        if folders[:1] == ["tests"]:
            seconds["/".join(folders[1:2])] += report.duration
    return seconds


def lines(seconds: dict[str, float]) -> Iterator[tuple[str, bool]]:
    """A line for each budget that was drawn on and each area without one; True if overrun."""
    left = dict(seconds)
    for areas, budget in BUDGETS.items():
        drawn = [area for area in areas if area in left]
        if drawn:
            spent = sum(left.pop(area) for area in drawn)
            over = spent > budget
            note = f"OVER by {spent - budget:.1f} s" if over else ""
            yield f"{' + '.join(drawn):<32}{spent:8.1f} s of {budget:4} s  {note}".rstrip(), over
    for area in sorted(left):
        yield f"{area or 'tests':<32}{left[area]:8.1f} s", False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table; an overrun is printed in red, and fails nothing."""
    reports = [
        report
        for group in terminalreporter.stats.values()
        for report in group
        if isinstance(report, pytest.TestReport)
    ]
    if reports:
        terminalreporter.section("seconds by area")
    for line, over in lines(seconds_by_area(reports)):
        terminalreporter.write_line(line, red=over, bold=over)
