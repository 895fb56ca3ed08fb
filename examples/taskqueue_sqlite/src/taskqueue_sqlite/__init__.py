"""A durable backend in one SQLite file."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from taskqueue_core.config import load_settings
from taskqueue_sqlite.backend import SqliteBackend

__all__ = ["SqliteBackend", "SqliteSettings", "create_backend"]


class SqliteSettings(BaseSettings):
    """Settings, from the environment (``TASKQUEUE_SQLITE_…``) or a ``.env`` file."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_SQLITE_", env_file=".env", extra="ignore"
    )
    path: Path = Path("taskqueue.db")
    flush: bool = True
    """whether answers wait for the disk; without, a power cut may take the last ones back"""
    grace: float = Field(10.0, ge=0, le=3600, allow_inf_nan=False)
    """seconds that workers have after a crash of this process to come back for what they run"""


def create_backend() -> SqliteBackend:
    """Make a backend by the settings. Its first call opens the file, or makes it."""
    settings = load_settings(SqliteSettings)
    return SqliteBackend(settings.path, flush=settings.flush, grace=settings.grace)
