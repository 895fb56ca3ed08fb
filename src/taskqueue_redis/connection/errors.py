"""Converting connection failures to the errors that the backend contract defines."""

from __future__ import annotations

from taskqueue_core.errors import BackendUnavailable, ConfigurationError
from taskqueue_redis.connection.failures import (
    AnswerLost,
    Failure,
    Misconfigured,
    NotReached,
    Refused,
)


def contract_error(failure: Failure) -> ConfigurationError | BackendUnavailable:
    """Return the error that a backend raises for a failure. The caller raises it ``from`` the failure."""
    match failure:
        case Misconfigured() if failure.started:
            return BackendUnavailable(f"the store is unavailable: {failure}")
        case Misconfigured():
            return ConfigurationError(str(failure))
        case NotReached():
            return BackendUnavailable("the store is unavailable")
        case AnswerLost():
            return BackendUnavailable("the store's response was lost")
        case Refused():
            return BackendUnavailable(f"the store accepts no writes: {failure.why}")
        case _:
            return BackendUnavailable(f"the store failed: {type(failure).__name__}")


class QueueReset(BackendUnavailable):
    """A partition of the store was flushed or replaced by another one, so its tasks are lost.

    The call that detects the reset logs and raises this error. Later calls use the new, empty partition.
    """

    code = "queue_reset"
