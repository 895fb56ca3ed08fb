"""Helpers for tests of the client session without a socket."""

from __future__ import annotations

from taskqueue_core.protocol.client_session import (
    ClientSession,
    ClientSessionState,
    Event,
    Welcomed,
)
from taskqueue_core.protocol.frames import (
    FEATURES,
    ClientFrame,
    Hello,
    ServerFrame,
    Welcome,
    WireLimits,
    decode_client,
    encode,
)


def sent(session: ClientSession) -> list[ClientFrame]:
    """Return the frames that the session sends now."""
    return [decode_client(text) for text in session.outgoing()]


def get(session: ClientSession, frame: ServerFrame) -> list[Event]:
    """Pass a frame to the session and return the events."""
    return session.receive(encode(frame))


def welcome(*adopted: str, **limits: int) -> Welcome:
    """Return a welcome frame."""
    return Welcome(
        connection_id="c1",
        lease=9.0,
        server="x",
        adopted=list(adopted),
        limits=WireLimits(**limits),
    )


def ready(capacity: int = 3, **limits: int) -> ClientSession:
    """Return a session that has been welcomed."""
    session = ClientSession("w1", ["a", "b"], capacity, "secret")
    session.connected()
    (hello,) = sent(session)
    assert hello == Hello(
        worker_id="w1",
        keys=["a", "b"],
        credit=capacity,
        token="secret",
        features=list(FEATURES),
    )
    assert get(session, welcome(**limits)) == [Welcomed("c1", 0, 0)]
    assert session.state is ClientSessionState.READY
    assert session.lease == 9.0
    return session


def reconnected(session: ClientSession, *adopted: str) -> tuple[Hello, list[Event]]:
    """Break the connection and make a new one; return the hello, and the events of the welcome."""
    session.disconnected()
    session.connected()
    (hello,) = sent(session)
    assert isinstance(hello, Hello)
    return hello, get(session, welcome(*adopted))
