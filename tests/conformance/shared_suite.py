"""The kit on the SQLite backend that several processes share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

from taskqueue_conformance import Harness
from taskqueue_core.backend import Backend
from taskqueue_core.clock import ManualClock
from tests.conformance.shared_sqlite import CAPABILITIES, SharedBackend, open_shared


class OnSharedFile(Harness):
    """Backends that share a file; each test has a new file."""

    capabilities = CAPABILITIES
    mistakes: tuple[str, ...] = ()
    folder: Path
    """folder of the files, set by whatever runs the tests"""

    async def open_backend(self, clock: ManualClock) -> Backend:
        """Return a backend on a new file."""
        path = self.folder / f"{secrets.token_hex(4)}.db"
        return SharedBackend(path, clock, mistakes=self.mistakes)

    async def replica(self, backend: Backend) -> Backend:
        """Return another backend on the same file."""
        shared = cast("SharedBackend", backend)
        return SharedBackend(shared.path, shared.clock, mistakes=self.mistakes)

    def opener(self, backend: Backend) -> Callable[[], Backend]:
        """Return a function that opens the file in another process."""
        return partial(open_shared, cast("SharedBackend", backend).path, self.mistakes)

    async def stored(self, backend: Backend) -> int:
        """Count the rows of all tables."""
        return cast("SharedBackend", backend).store.size()

    @contextmanager
    def failing(self, backend: Backend, writes: int) -> Iterator[None]:
        """Let the file fail after ``writes`` statements that change it."""
        store = cast("SharedBackend", backend).store
        store.writes = writes
        try:
            yield
        finally:
            store.writes = None

    @contextmanager
    def unanswered(self, backend: Backend) -> Iterator[None]:
        """Let each COMMIT succeed, and then raise an error."""
        store = cast("SharedBackend", backend).store
        store.unanswered = True
        try:
            yield
        finally:
            store.unanswered = False
