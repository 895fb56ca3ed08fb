"""How tests are shared out to processes, and the seconds that each area takes, against its budget."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/spark/", "tests/prefect/")
"""Each of these runs in one process: its tests share a Spark session, or servers of Prefect, which start slowly."""
FIRST = (*TOGETHER, "tests/chaos/", "tests/dispatch/", "tests/redis/", "tests/server/")
"""The longest areas begin, so that no process works alone at the end."""
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


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist brings no types
    """Gives a process the next `group` of tests when it has no more than one test left."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """Return what runs in one process with a test: its file, or its folder in `TOGETHER`."""
    path = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if path.startswith(folder)), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Share the tests out by file."""
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest areas first, and leave the other tests in their order."""
    ranks = {folder: rank for rank, folder in enumerate(FIRST)}
    items.sort(key=lambda item: ranks.get("/".join(item.nodeid.split("/")[:2]) + "/", len(FIRST)))


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
