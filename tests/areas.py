"""How the tests are shared out to processes."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/spark/", "tests/prefect/")
"""Each of these runs in one process: its tests share a Spark session, or servers of Prefect, which start slowly."""
FIRST = (*TOGETHER, "tests/chaos/", "tests/dispatch/", "tests/redis/", "tests/server/")
"""The longest areas begin, so that no process works alone at the end."""


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
