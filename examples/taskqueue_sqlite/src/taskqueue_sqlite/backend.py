"""The SQLite backend and its settings."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict
from taskqueue_core.clock import Clock, SystemClock
from taskqueue_core.config import load_settings
from taskqueue_core.recordstore import RecordBackend

from taskqueue_sqlite.store import SQLiteStore


class SQLiteSettings(BaseSettings):
    """Settings from the environment and ``.env``: ``TASKQUEUE_SQLITE_…``."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_SQLITE_", env_file=".env", extra="ignore"
    )

    path: Path = Path("taskqueue.db")
    """path of the database file, which is created if it is missing; its folder must exist"""


class SQLiteBackend(RecordBackend):
    """A backend that stores everything in the file at ``path``."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path = path
        super().__init__("sqlite", SQLiteStore(path), clock or SystemClock(), durable=True)


def create_backend() -> SQLiteBackend:
    """Return a backend with the configured settings; its first call opens the file."""
    return SQLiteBackend(load_settings(SQLiteSettings).path)
