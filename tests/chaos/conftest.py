"""Fixtures and hooks for the chaos tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder for the logs of a run; pytest keeps it if the test fails."""
    return tmp_path / "run"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings about a connection that reached a proxy just while it was being stopped.

    asyncio accepts such a connection after the server was closed. The garbage collector closes it later, and pytest
    would then report the warning in whichever test is running.
    """
    ignore = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(ignore)
