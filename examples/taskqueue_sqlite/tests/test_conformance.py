"""The conformance tests for the SQLite backend. Each test uses a new file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from taskqueue_conformance import BackendSuite
from taskqueue_core.backend import Backend, Capabilities, Capability
from taskqueue_core.clock import ManualClock

from taskqueue_sqlite import SQLiteBackend


class TestSQLite(BackendSuite):
    """The conformance tests for a backend whose records survive the process."""

    capabilities = Capabilities(
        names=frozenset({Capability.DEAD_LETTERS, Capability.CONTROL, Capability.FLOW}),
        durable=True,
    )

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        self.files = (tmp_path / f"{number}.db" for number in itertools.count())
        self.made: dict[Backend, tuple[Path, ManualClock]] = {}

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Return a backend on a new file."""
        return self.make(next(self.files), clock)

    async def reopen(self, backend: Backend) -> Backend:
        """Return a second backend on the same file."""
        await backend.aclose()
        return self.make(*self.made[backend])

    def make(self, path: Path, clock: ManualClock) -> Backend:
        """Return a backend on a file, and remember its path."""
        backend = SQLiteBackend(path, clock)
        self.made[backend] = path, clock
        return backend
