"""What a server said, in the words of the dispatcher."""

from __future__ import annotations

import msgspec

__all__ = ["Accepted", "Answer", "Busy", "Done", "Failed", "Missing", "Running", "Unreachable"]


class Done(msgspec.Struct, frozen=True):
    """The job is done."""

    result: bytes
    """JSON text"""


class Accepted(msgspec.Struct, frozen=True):
    """The server has taken the job, and will know it by this id."""

    remote_id: str


class Running(msgspec.Struct, frozen=True):
    """The server has the job, and no result yet."""

    progress: float | str | None = None


class Missing(msgspec.Struct, frozen=True):
    """The server does not know the job: it was never there, or the server began anew."""


class Busy(msgspec.Struct, frozen=True):
    """The server has not taken the job, by no fault of the job or of itself."""

    retry_after: float | None = None


class Unreachable(msgspec.Struct, frozen=True):
    """No answer, or none that is whole."""

    error: str
    sent: bool
    """whether the server may have got the request"""


class Failed(msgspec.Struct, frozen=True):
    """The job has failed there, or its answer can't be used."""

    error: str
    final: bool = False
    """it would fail elsewhere, and later, in the same way"""


Answer = Done | Accepted | Running | Missing | Busy | Unreachable | Failed
