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
    """whether an answer waits for the disk (full), or a power cut may take the last ones back (normal)"""
    grace: float = Field(10.0, ge=0, le=3600, allow_inf_nan=False)
    """seconds that workers have after a crash of the server to come back for what they run"""


def create_backend() -> SqliteBackend:
    """Make a backend from the settings; the file is opened, and made, by the first call."""
    settings = load_settings(SqliteSettings)
    return SqliteBackend(
        settings.path, synchronous=settings.synchronous == "full", grace=settings.grace
    )
