"""The conformance tests for the SQLite backend. Each test uses a new file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from taskqueue_conformance import BackendSuite
from taskqueue_core.backend import Backend, Capabilities, Capability
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable

from taskqueue_sqlite import SQLiteBackend


class TestSQLite(BackendSuite):
    """The conformance tests for a backend whose records survive the process."""

    capabilities = Capabilities(
        names=frozenset(
            {
                Capability.DEAD_LETTERS,
                Capability.CONTROL,
                Capability.FLOW,
                Capability.UNIQUE,
                Capability.AUDIT,
                Capability.SCHEDULES,
                Capability.AFTER,
                Capability.LISTING,
                Capability.STREAMS,
            }
        ),
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

    def opener(self, backend: Backend) -> Callable[[], Backend]:
        """Return a function that opens the file in another process, after this one has closed it."""
        return partial(SQLiteBackend, self.made[backend][0])

    async def stored(self, backend: Backend) -> int:
        """Count the rows of all tables."""
        store = backend._transitions.store
        tables = ("records", "schedules", "links", "counters", "settings", "buckets")
        return sum(store._run(f"SELECT count(*) FROM {table}")[0][0] for table in tables)  # noqa: S608

    @contextmanager
    def failing(self, backend: Backend, writes: int) -> Iterator[None]:
        """Let the file fail after ``writes`` statements that change it."""
        store, run, left = backend._transitions.store, backend._transitions.store._run, [writes]

        def fail_later(query: str, *values: object) -> list[tuple[object, ...]]:
            if not query.startswith("SELECT"):
                left[0] -= 1
                if left[0] < 0:
                    raise BackendUnavailable("disk I/O error")
            return run(query, *values)

        store._run = fail_later
        try:
            yield
        finally:
            del store._run

    def make(self, path: Path, clock: ManualClock) -> Backend:
        """Return a backend on a file, and remember its path."""
        backend = SQLiteBackend(path, clock)
        self.made[backend] = path, clock
        return backend
