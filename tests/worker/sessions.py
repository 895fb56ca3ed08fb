"""Moves on a client session without a socket, for its tests."""

from __future__ import annotations

from taskqueue_core.protocol.client_session import (
    ClientSession,
    ClientSessionState,
    Event,
    Welcomed,
)
from taskqueue_core.protocol.frames import (
    ClientFrame,
    Hello,
    ServerFrame,
    Welcome,
    WireLimits,
    decode_client,
    encode,
)


def sent(session: ClientSession) -> list[ClientFrame]:
    """Return what the session sends now."""
    return [decode_client(text) for text in session.outgoing()]


def get(session: ClientSession, frame: ServerFrame) -> list[Event]:
    """Let the session receive a frame."""
    return session.receive(encode(frame))


def welcome(*adopted: str, **limits: int) -> Welcome:
    """Make a welcome."""
    return Welcome(
        connection_id="c1",
        lease=9.0,
        server="x",
        adopted=list(adopted),
        limits=WireLimits(**limits),
    )


def ready(capacity: int = 3, **limits: int) -> ClientSession:
    """Return a session that was welcomed."""
    session = ClientSession("w1", ["a", "b"], capacity, "secret")
    session.connected()
    (hello,) = sent(session)
    assert hello == Hello(worker_id="w1", keys=["a", "b"], credit=capacity, token="secret")
    assert get(session, welcome(**limits)) == [Welcomed("c1", 0, 0)]
    assert session.state is ClientSessionState.READY
    assert session.lease == 9.0
    return session


def reconnected(session: ClientSession, *adopted: str) -> tuple[Hello, list[Event]]:
    """Break the connection and make a new one; return the hello and what the welcome meant."""
    session.disconnected()
    session.connected()
    (hello,) = sent(session)
    assert isinstance(hello, Hello)
    return hello, get(session, welcome(*adopted))
