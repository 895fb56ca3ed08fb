"""How pytest-xdist distributes the tests over its worker processes."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/spark/", "tests/prefect/")
"""Folders whose tests all run in one process, because they share a Spark session or Prefect servers, which start
slowly."""
FIRST = (*TOGETHER, "tests/chaos/", "tests/dispatch/", "tests/redis/", "tests/server/")
"""Areas that take longest. They start first, so that no process is still busy with one of them at the end of the
run."""


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist brings no types
    """xdist scheduler that assigns whole groups of tests (see `group`) to a process that has at most one test left."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        # keep the order set by pytest_collection_modifyitems
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def group(nodeid: str) -> str:
    """Return the group that a test belongs to: its folder if listed in `TOGETHER`, otherwise its file."""
    path = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if path.startswith(folder)), path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Make xdist use `ByFile`, so that all tests of a file run in one process."""
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of the areas in `FIRST` to the front and keep the order of all other tests."""
    ranks = {folder: rank for rank, folder in enumerate(FIRST)}
    items.sort(key=lambda item: ranks.get("/".join(item.nodeid.split("/")[:2]) + "/", len(FIRST)))
