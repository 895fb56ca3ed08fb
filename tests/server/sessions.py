"""Sessions of the server without sockets, and what is said to them and by them, for their tests."""

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
    """Return a frame's text."""
    return msgspec.json.encode({"type": kind, **fields}).decode()


def said(events: list[Event] | list[str]) -> list[dict[str, Any]]:
    """Return the frames that are to be sent."""
    texts = [event.text for event in events if isinstance(event, SendFrames)] or [
        event for event in events if isinstance(event, str)
    ]
    return [msgspec.json.decode(t) for t in texts]


def greeted(**hello: Any) -> ServerSession:
    """Return a session that waits for its welcome."""
    session = ServerSession()
    (event,) = session.feed(text("hello", worker_id="w", keys=["k"], **hello))
    assert isinstance(event, Greeted)
    return session


def ready(credit: int = 10, *held: str) -> ServerSession:
    """A session with credit left, and these receipts held beyond it."""
    session = greeted(credit=credit + len(held))
    session.welcome("c", 15.0, "1")
    session.deliver([delivery(receipt) for receipt in held])
    return session


def refused(events: list[Event], code: str) -> None:
    """An error frame with the code, and a close whose reason fits and repeats nothing of the user's."""
    say, hangup = events
    assert isinstance(say, SendFrames)
    assert msgspec.json.decode(say.text)["code"] == code
    assert hangup == CloseSocket(CLOSE_PROTOCOL, code)
