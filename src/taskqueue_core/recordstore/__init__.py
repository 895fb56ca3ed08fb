"""A complete backend for any store with transactions that only this process uses: the author writes a `RecordStore`.

`docs/writing-a-backend.md` explains it, and `examples/taskqueue_sqlite` is an example.
"""

from taskqueue_core.recordstore.backend import RecordBackend
from taskqueue_core.recordstore.store import Record, RecordStore

__all__ = ["Record", "RecordBackend", "RecordStore"]
