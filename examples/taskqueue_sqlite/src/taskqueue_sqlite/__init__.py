"""A durable backend that stores everything in one SQLite file, for use by one process at a time."""

from taskqueue_sqlite.backend import SQLiteBackend, SQLiteSettings, create_backend

__all__ = ["SQLiteBackend", "SQLiteSettings", "create_backend"]
