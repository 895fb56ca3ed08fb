"""The stored form of a schedule: JSON text that a store keeps without reading it."""

from __future__ import annotations

from typing import Literal

import msgspec

from taskqueue_core.errors import InvalidInput, TooLarge
from taskqueue_core.limits import LIMITS
from taskqueue_core.schedules.schedule import Schedule

__all__ = ["Spec"]


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule with what the store keeps about its origin."""

    v: Literal[1] = 1
    """version of the form; another one is refused, because it may mean what this program does not know"""
    schedule: Schedule
    declared_by: str | None = None
    """the prefix of the registry that declares it, which may be empty; ``None``: it was put at run time"""

    paused: bool | None = None
    """what the last pause or resume has set, instead of `Schedule.paused`"""

    @property
    def is_paused(self) -> bool:
        """Whether the schedule is paused."""
        return self.schedule.paused if self.paused is None else self.paused

    def encode(self) -> bytes:
        """Return the JSON text. Raises `TooLarge`."""
        text = _encoder.encode(self)
        if len(text) > LIMITS.payload:
            allowed = f"at most {LIMITS.payload} bytes as JSON, with the payload of its task (limit payload)"
            raise TooLarge("schedule", f"{len(text)} bytes", allowed)
        return text

    @staticmethod
    def decode(text: bytes) -> Spec:
        """Read a JSON text. Raises `InvalidInput` if a field is not allowed, or its time zone is not known here."""
        try:
            return _decoder.decode(text)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidInput):
                raise error.__cause__ from None
            raise InvalidInput(
                "schedule", str(error), "a schedule that this version reads"
            ) from None
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise InvalidInput("schedule", "text that is no JSON", "JSON text") from None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Spec)
