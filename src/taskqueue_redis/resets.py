"""The error for a store that lost everything behind our back."""

from __future__ import annotations

from taskqueue_core.errors import BackendUnavailable

__all__ = ["QueueReset"]


class QueueReset(BackendUnavailable):
    """The store was flushed, or replaced by an empty or older one: tasks that it held are gone.

    Raised once per process; the next call works on what is there now.
    """

    code = "queue_reset"
