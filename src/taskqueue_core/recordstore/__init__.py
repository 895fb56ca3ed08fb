"""A whole backend for any store with transactions and look-ups in this process: write a `RecordStore`, get the rest.

docs/writing-a-backend.md explains it; `examples/taskqueue_sqlite` is one.
"""

from taskqueue_core.recordstore.backend import RecordBackend
from taskqueue_core.recordstore.store import Record, RecordStore

__all__ = ["Record", "RecordBackend", "RecordStore"]
