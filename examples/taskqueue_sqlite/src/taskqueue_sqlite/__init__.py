"""A durable backend in one SQLite file."""

from pathlib import Path
from typing import Literal

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
    synchronous: Literal["full", "normal"] = "full"
    """full: answers wait for the disk; normal: a power cut may take the last ones back"""
    grace: float = Field(10.0, ge=0, le=3600, allow_inf_nan=False)
    """seconds that workers have after a crash of this process to come back for what they run"""


def create_backend() -> SqliteBackend:
    """Make a backend by the settings. Its first call opens the file, or makes it."""
    settings = load_settings(SqliteSettings)
    flush = settings.synchronous == "full"
    return SqliteBackend(settings.path, flush=flush, grace=settings.grace)
