"""What a worker's frames ask of the server: the events of a `taskqueue_core.protocol.server_session.ServerSession`."""

from __future__ import annotations

import msgspec

from taskqueue_core.protocol.frames import Hello
from taskqueue_core.tasks import Delivery


class Greeted(msgspec.Struct, frozen=True):
    """A worker introduced itself; a welcome or a refusal is due."""

    hello: Hello


class CreditGranted(msgspec.Struct, frozen=True):
    """There is credit."""

    n: int


class AckRequested(msgspec.Struct, frozen=True):
    """Executed, with results in the same order."""

    deliveries: tuple[Delivery, ...]
    results: tuple[bytes | None, ...]


class ReleaseRequested(msgspec.Struct, frozen=True):
    """Handed back."""

    deliveries: tuple[Delivery, ...]


class RetryRequested(msgspec.Struct, frozen=True):
    """Failed; the queue's policy decides, except that ``delay`` overrides its wait."""

    delivery: Delivery
    error: str
    delay: float | None


class DeadLetterRequested(msgspec.Struct, frozen=True):
    """Given up."""

    delivery: Delivery
    reason: str
    error: str | None


class Progressed(msgspec.Struct, frozen=True):
    """How far a task is. Settles nothing."""

    delivery: Delivery
    value: float | str


class WorkerLeft(msgspec.Struct, frozen=True):
    """The worker said bye; the session is closed."""


class SendFrames(msgspec.Struct, frozen=True):
    """A frame to send."""

    text: str


class CloseSocket(msgspec.Struct, frozen=True):
    """The session is closed: close the socket with this code."""

    code: int
    reason: str


Settlement = AckRequested | ReleaseRequested | RetryRequested | DeadLetterRequested
Event = Greeted | CreditGranted | Settlement | Progressed | WorkerLeft | SendFrames | CloseSocket
