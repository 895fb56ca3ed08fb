"""The kit, on a new file for each backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from taskqueue_core.backend import Backend
from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance import BackendSuite
from taskqueue_core.tasks import new_id

from taskqueue_sqlite import SQLiteBackend


class TestSQLite(BackendSuite):
    """Dead letters and control, durable."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Make a backend on a file that is not there."""
        self.clock, self.path = clock, self.folder / new_id()
        return SQLiteBackend(self.path, clock)

    async def reopen(self, backend: Backend) -> Backend:
        """Make another on the same file."""
        await backend.aclose()
        return SQLiteBackend(self.path, self.clock)
