"""What goes wrong here and nowhere else."""

from __future__ import annotations

from taskqueue_core.errors import ConfigurationError

__all__ = ["QueueNotInUse"]


class QueueNotInUse(ConfigurationError):
    """A server would not use the queue that is configured, and is to be strict about that."""
