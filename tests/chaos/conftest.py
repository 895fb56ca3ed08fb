"""What the cases share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a run: its logs stay there when it fails."""
    return tmp_path / "run"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a connection that reached a proxy while it was being stopped be closed by the garbage collector.

    asyncio lets it in after its server was closed; whichever test runs then would be blamed.
    """
    ignore = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(ignore)
