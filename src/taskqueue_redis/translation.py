"""From the failures of the store to the errors of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from taskqueue_core.errors import BackendUnavailable, ConfigurationError
from taskqueue_redis.failures import (
    AnswerLost,
    Failure,
    Misconfigured,
    NotReached,
    Refused,
)

__all__ = ["translated"]


@contextmanager
def translated(*kept: type[Failure]) -> Iterator[None]:
    """Raise the contract's errors in place of the store's, but for the ``kept`` ones."""
    try:
        yield
    except Failure as failure:
        if isinstance(failure, kept):
            raise
        match failure:
            case Misconfigured():
                raise ConfigurationError(str(failure)) from failure
            case NotReached():
                raise BackendUnavailable("the store is out of reach") from failure
            case AnswerLost():
                raise BackendUnavailable("the store's answer was lost") from failure
            case Refused():
                raise BackendUnavailable(
                    f"the store takes no writes now: {failure.why}"
                ) from failure
            case _:
                raise BackendUnavailable(f"the store failed: {type(failure).__name__}") from failure
