"""The file: steps that are done whole or not at all, and one flush for all who wait for the disk."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from taskqueue_core.errors import BackendUnavailable, TaskQueueError


class Database:
    """A connection, opened by the first step, that has the file for itself."""

    def __init__(self, path: Path, *, synchronous: bool) -> None:
        self._log = f"{path}-wal" if synchronous else None
        self._path, self._closed, self._flushed = path, False, 0
        self._db: sqlite3.Connection | None = None
        self._disk = asyncio.Lock()

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, to be used within a step."""
        if self._closed:
            raise BackendUnavailable("the backend is closed")
        if self._db is None:
            db = sqlite3.connect(self._path, isolation_level=None)
            db.executescript((files(__package__) / "schema.sql").read_text())
            self.opened(db)
            self._db = db
        return self._db

    def opened(self, db: sqlite3.Connection) -> None:
        """Look at what an earlier process left."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Do all of it or nothing. No step awaits anything, so that no cancellation can split it."""
        try:
            db = self.db
            db.execute("BEGIN IMMEDIATE")
            try:
                yield
                db.execute("COMMIT")
            finally:
                db.rollback()  # what was not committed
        except sqlite3.Error as error:
            raise BackendUnavailable(f"SQLite: {error}") from error

    async def flush(self, failure: type[TaskQueueError] = BackendUnavailable) -> None:
        """Wait until every step done so far is on the disk. Who waits meanwhile shares the next flush."""
        wanted = self.db.total_changes
        async with self._disk:
            if self._log and self._db is not None and self._flushed < wanted:
                changes = self._db.total_changes
                try:
                    await asyncio.to_thread(_flush, self._log)
                except OSError as error:
                    raise failure(f"the disk did not confirm: {error.strerror}") from error
                self._flushed = changes

    async def aclose(self) -> None:
        """Close it for good."""
        async with self._disk:
            if self._db is not None:
                self._db.close()
            self._db, self._closed = None, True


def _flush(path: str) -> None:
    with open(path, "rb") as log:  # noqa: PTH123
        os.fsync(log.fileno())
