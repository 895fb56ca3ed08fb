"""What a worker's frames ask of the server: the events of a `taskqueue_core.protocol.server_session.ServerSession`."""

from __future__ import annotations

import msgspec

from taskqueue_core.protocol.frames import Hello
from taskqueue_core.tasks import Delivery

__all__ = [
    "Acked",
    "Buried",
    "Event",
    "Granted",
    "Greeted",
    "HandedBack",
    "Hangup",
    "Left",
    "Progressed",
    "RetryAsked",
    "Say",
    "Settlement",
]


class Greeted(msgspec.Struct, frozen=True):
    """A worker introduced itself; a welcome or a refusal is due."""

    hello: Hello


class Granted(msgspec.Struct, frozen=True):
    """There is credit."""

    n: int


class Acked(msgspec.Struct, frozen=True):
    """Executed, with results in the same order."""

    deliveries: tuple[Delivery, ...]
    results: tuple[bytes | None, ...]


class HandedBack(msgspec.Struct, frozen=True):
    """Handed back."""

    deliveries: tuple[Delivery, ...]


class RetryAsked(msgspec.Struct, frozen=True):
    """Failed; the queue's policy decides, except that ``delay`` overrides its wait."""

    delivery: Delivery
    error: str
    delay: float | None


class Buried(msgspec.Struct, frozen=True):
    """Given up."""

    delivery: Delivery
    reason: str
    error: str | None


class Progressed(msgspec.Struct, frozen=True):
    """How far a task is. Settles nothing."""

    delivery: Delivery
    value: float | str


class Left(msgspec.Struct, frozen=True):
    """The worker said bye; the session is closed."""


class Say(msgspec.Struct, frozen=True):
    """A frame to send."""

    text: str


class Hangup(msgspec.Struct, frozen=True):
    """The session is closed: close the socket with this code."""

    code: int
    reason: str


Settlement = Acked | HandedBack | RetryAsked | Buried
Event = Greeted | Granted | Settlement | Progressed | Left | Say | Hangup
