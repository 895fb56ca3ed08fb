"""The kit, on a file of its own for each test."""

import pytest
from taskqueue_core.backend import Backend
from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance import BackendSuite

from taskqueue_sqlite import SQLiteBackend, SQLiteSettings


class TestSQLite(BackendSuite):
    """Dead letters and control, durable."""

    max_examples = 100

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folders = tmp_path_factory

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Open an empty file."""
        self.clock, self.file = clock, self.folders.mktemp("sqlite") / "tasks.db"
        return SQLiteBackend(SQLiteSettings(path=self.file), clock)

    async def reopen(self, backend: Backend) -> Backend:
        """Open the file again."""
        await backend.aclose()
        return SQLiteBackend(SQLiteSettings(path=self.file), self.clock)
