"""Helpers for tests of server sessions without sockets: deliveries, frames and prepared sessions."""

from __future__ import annotations

from typing import Any

import msgspec

from taskqueue_core.protocol.frames import CLOSE_PROTOCOL
from taskqueue_core.protocol.server_session import (
    CloseSocket,
    Event,
    Greeted,
    SendFrames,
    ServerSession,
)
from taskqueue_core.tasks import Delivery, Task


def delivery(receipt: str, payload: bytes = b"null") -> Delivery:
    """Return a delivery with this receipt."""
    task = Task(key="k", id=f"task-{receipt}", payload=payload)
    return Delivery(task=task, receipt=receipt, attempt=1, delivered_at=1.0)


def text(kind: str, **fields: Any) -> str:
    """Return the text of a frame."""
    return msgspec.json.encode({"type": kind, **fields}).decode()


def said(events: list[Event] | list[str]) -> list[dict[str, Any]]:
    """Return the frames that these events send, decoded."""
    texts = [event.text for event in events if isinstance(event, SendFrames)] or [
        event for event in events if isinstance(event, str)
    ]
    return [msgspec.json.decode(t) for t in texts]


def greeted(**hello: Any) -> ServerSession:
    """Return a session that has received a hello but not been welcomed yet."""
    session = ServerSession()
    (event,) = session.feed(text("hello", worker_id="w", keys=["k"], **hello))
    assert isinstance(event, Greeted)
    return session


def ready(credit: int = 10, *held: str) -> ServerSession:
    """Return a welcomed session with ``credit`` unused credit and these receipts held in addition."""
    session = greeted(credit=credit + len(held))
    session.welcome("c", 15.0, "1")
    session.deliver([delivery(receipt) for receipt in held])
    return session


def refused(events: list[Event], code: str) -> None:
    """Check that the events are an error frame with this code and a close.

    The reason must fit into a close frame and must not repeat input of the user.
    """
    say, hangup = events
    assert isinstance(say, SendFrames)
    assert msgspec.json.decode(say.text)["code"] == code
    assert hangup == CloseSocket(CLOSE_PROTOCOL, code)
