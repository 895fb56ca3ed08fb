"""Events of a `taskqueue_core.protocol.server_session.ServerSession`: what a worker's frame requires of the server."""

from __future__ import annotations

import msgspec

from taskqueue_core.protocol.frames import Hello
from taskqueue_core.tasks import Delivery


class Greeted(msgspec.Struct, frozen=True):
    """The worker has sent its hello; answer with a welcome or a refusal."""

    hello: Hello


class CreditGranted(msgspec.Struct, frozen=True):
    """The worker accepts ``n`` more deliveries."""

    n: int


class AckRequested(msgspec.Struct, frozen=True):
    """The worker executed the tasks; ``results`` contains one value per delivery, in the same order."""

    deliveries: tuple[Delivery, ...]
    results: tuple[bytes | None, ...]


class ReleaseRequested(msgspec.Struct, frozen=True):
    """The worker did not execute the tasks; their deliveries must be released."""

    deliveries: tuple[Delivery, ...]


class RetryRequested(msgspec.Struct, frozen=True):
    """The attempt failed. Apply the queue's retry policy; ``delay``, if it is set, overrides the policy's delay."""

    delivery: Delivery
    error: str
    delay: float | None


class DeadLetterRequested(msgspec.Struct, frozen=True):
    """The task must become a dead letter."""

    delivery: Delivery
    reason: str
    error: str | None


class Progressed(msgspec.Struct, frozen=True):
    """The worker reported the progress of a running task."""

    delivery: Delivery
    value: float | str


class WorkerLeft(msgspec.Struct, frozen=True):
    """The worker said bye; the session is closed."""


class SendFrames(msgspec.Struct, frozen=True):
    """The text of a frame that the server must send."""

    text: str


class CloseSocket(msgspec.Struct, frozen=True):
    """The session is closed: close the socket with this code."""

    code: int
    reason: str


Settlement = AckRequested | ReleaseRequested | RetryRequested | DeadLetterRequested
Event = Greeted | CreditGranted | Settlement | Progressed | WorkerLeft | SendFrames | CloseSocket
