"""What the cases share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.redis.engines import discover


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a run: its logs stay there when it fails. Fails where there is no redis-server."""
    if discover().best is None:
        pytest.fail("no redis-server was found")
    return tmp_path / "run"
