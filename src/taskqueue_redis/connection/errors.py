"""From the failures of the store to the errors of the contract."""

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
    """Return the error of the contract that stands for a failure; raise it ``from`` the failure."""
    match failure:
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
    """A partition of the store was flushed, or replaced by another one: tasks that it held are gone.

    Raised by the call that notices, and logged as an error; the next call works on what is there now.
    """

    code = "queue_reset"
