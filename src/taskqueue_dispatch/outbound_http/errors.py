"""Errors of outbound requests. No message contains an address or a part of a response."""

from __future__ import annotations

from taskqueue_core.errors import TaskQueueError


class NotReached(TaskQueueError):
    """The error if there was no complete response. A later attempt may succeed."""

    code = "not_reached"


class NameUnknown(NotReached):
    """The error if the host name does not exist."""

    code = "name_unknown"
