"""A durable backend in one SQLite file."""

from taskqueue_core.config import load_settings

from taskqueue_sqlite.backend import SqliteBackend
from taskqueue_sqlite.store import SqliteSettings

__all__ = ["SqliteBackend", "SqliteSettings", "create_backend"]


def create_backend() -> SqliteBackend:
    """Make a backend by the settings. Its first call opens the file, or makes it."""
    return SqliteBackend(load_settings(SqliteSettings))
