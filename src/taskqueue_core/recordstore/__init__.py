"""A backend that is complete except for its store: the author of a backend writes a `RecordStore`.

The store must support transactions, and no other process may use it. See `docs/writing-a-backend.md`, and
`examples/taskqueue_sqlite` for an example.
"""

from taskqueue_core.recordstore.backend import RecordBackend
from taskqueue_core.recordstore.store import Record, RecordStore, ScheduleRecord

__all__ = ["Record", "RecordBackend", "RecordStore", "ScheduleRecord"]
