"""From an error to the exit code of the process. `taskqueue_cli` lists the codes."""

from __future__ import annotations

from taskqueue_core.errors import (
    BackendUnavailable,
    ConfigurationError,
    InvalidInput,
    PublishUnconfirmed,
    TaskQueueError,
)

__all__ = ["FAILED", "INTERRUPTED", "exit_code"]

FAILED = 1
INTERRUPTED = 130
_USAGE = 2
_OUT_OF_REACH = 4


def exit_code(error: TaskQueueError) -> int:
    """Return the code. An error may bring its own as ``exit_code``."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    if isinstance(error, ConfigurationError | InvalidInput):
        return _USAGE
    if isinstance(error, BackendUnavailable | PublishUnconfirmed):
        return _OUT_OF_REACH
    return FAILED
