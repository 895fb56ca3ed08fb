"""The backend fulfils the contract."""

import pytest
from taskqueue_core.backend import Backend
from taskqueue_core.clock import ManualClock
from taskqueue_core.conformance import BackendSuite

from taskqueue_sqlite import SqliteBackend, SqliteSettings


class TestSqliteBackend(BackendSuite):
    """Every promise of the contract and of all capabilities, durability among them."""

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folders = tmp_path_factory

    async def open_backend(self, clock: ManualClock) -> SqliteBackend:
        """Open an empty file."""
        self.clock = clock
        self.path = self.folders.mktemp("store") / "taskqueue.db"
        return self._open()

    async def reopen(self, backend: Backend) -> SqliteBackend:
        """Open the file again."""
        await backend.aclose()
        return self._open()

    def _open(self) -> SqliteBackend:
        return SqliteBackend(SqliteSettings(path=self.path, flush=False, grace=0), self.clock)
