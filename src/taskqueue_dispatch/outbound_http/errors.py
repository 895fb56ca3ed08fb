"""What goes wrong on the way to a place. No message holds an address or anything that was answered."""

from __future__ import annotations

from taskqueue_core.errors import TaskQueueError


class NotReached(TaskQueueError):
    """There is no answer, or none that is whole. It may be otherwise later."""

    code = "not_reached"


class NameUnknown(NotReached):
    """Nothing has the name."""

    code = "name_unknown"
