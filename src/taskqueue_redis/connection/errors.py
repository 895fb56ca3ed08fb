"""From the failures of the store to the errors of the contract."""

from __future__ import annotations

from types import TracebackType

from taskqueue_core.errors import BackendUnavailable, ConfigurationError
from taskqueue_redis.connection.failures import (
    AnswerLost,
    Failure,
    Misconfigured,
    NotReached,
    Refused,
)


class translated:  # noqa: N801 - reads as the verb it is
    """Raise the contract's errors in place of the store's, but for the ``kept`` ones. For a ``with`` statement."""

    __slots__ = ("_kept",)

    def __init__(self, *kept: type[Failure]) -> None:
        self._kept = kept

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Translate."""
        if isinstance(error, Failure) and not isinstance(error, self._kept):
            raise _of(error) from error


def _of(failure: Failure) -> ConfigurationError | BackendUnavailable:
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
