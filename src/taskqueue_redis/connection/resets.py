"""The error for a store that lost everything behind our back."""

from __future__ import annotations

from taskqueue_core.errors import BackendUnavailable

__all__ = ["QueueReset"]


class QueueReset(BackendUnavailable):
    """A partition of the store was flushed, or replaced by another one: tasks that it held are gone.

    Raised by the call that notices, and logged as an error; the next call works on what is there now.
    """

    code = "queue_reset"
