"""A durable backend in one SQLite file, for one process at a time."""

from taskqueue_core.config import load_settings

from taskqueue_sqlite.backend import SQLiteBackend, SQLiteSettings

__all__ = ["SQLiteBackend", "SQLiteSettings", "create_backend"]


def create_backend() -> SQLiteBackend:
    """Make a backend by its settings; the file is opened by the first call."""
    return SQLiteBackend(load_settings(SQLiteSettings))
