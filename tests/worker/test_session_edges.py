"""Boundary cases of sessions: a lost connection, the largest frame, and the largest credit."""

from __future__ import annotations

import pytest

from taskqueue_core.errors import ProtocolViolation
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.client_session import ClientSession
from taskqueue_core.protocol.frames import Deliver, Hello, Ping, decode_server, encode, to_wire
from taskqueue_core.protocol.server_session import ServerSession
from taskqueue_core.tasks import Delivery, Task
from tests.worker.sessions import get, ready, reconnected, sent


def delivery(receipt: str, payload: bytes = b"null") -> Delivery:
    """Return a delivery with this receipt."""
    task = Task(key="a", id=receipt, payload=payload)
    return Delivery(task=task, receipt=receipt, attempt=1, delivered_at=1.0)


def greeted() -> ServerSession:
    """Return a server session that may send deliveries."""
    session = ServerSession()
    session.feed(encode(Hello(worker_id="w", keys=["a"], credit=10)))
    session.welcome("c", 15.0, "1")
    return session


def holding(*receipts: str, capacity: int = 3) -> ClientSession:
    """Return a client session that holds these receipts."""
    session = ready(capacity)
    deliveries = [to_wire(delivery(receipt)) for receipt in receipts]
    get(session, Deliver(deliveries=deliveries))
    sent(session)
    return session


def test_a_new_connection_answers_no_ping_of_the_last_one() -> None:
    """G3, fault M5: a ping of the last connection is not answered on the next one."""
    session = ready()
    get(session, Ping(n=7))
    hello, _ = reconnected(session)
    assert isinstance(hello, Hello)
    assert sent(session) == []


def test_a_lost_connection_loses_progress() -> None:
    """Fault M5: progress that was not sent before a reconnect is dropped, because it may be outdated."""
    session = holding("r1")
    session.progress("r1", 0.5)
    reconnected(session, "r1")
    assert sent(session) == []


def test_a_frame_may_be_as_large_as_the_limit() -> None:
    """G8, fault M5: a frame of exactly the maximum size is accepted, and one byte more is not."""
    text = encode(Ping(n=1)).ljust(LIMITS.frame)
    assert decode_server(text) == Ping(n=1)
    with pytest.raises(ProtocolViolation, match="at most"):
        decode_server(text + " ")


def test_what_is_held_counts_against_the_most_that_may_be_asked_for() -> None:
    """G1, fault M5: held receipts and credit together never exceed the limit, so that a hello can name them all."""
    session = ready(LIMITS.credit)
    get(session, Deliver(deliveries=[to_wire(delivery("r1"))]))
    session.free()
    sent(session)
    hello, _ = reconnected(session, "r1")
    assert hello.credit + len(hello.holding) <= LIMITS.credit


def frames(*sizes: int) -> list[int]:
    """Return the sizes of the frames for deliveries with payloads of these sizes.

    All deliveries must be in the frames.
    """
    deliveries = [delivery(f"r{n}", b'"%s"' % (b"x" * size)) for n, size in enumerate(sizes)]
    told = list(greeted().deliver(deliveries))
    assert [one for _, some in told for one in some] == deliveries
    return [len(text.encode()) for text, _ in told]


def test_frames_of_deliveries_keep_the_limit() -> None:
    """G8, fault M5: deliveries fill a frame to the last byte, and no frame exceeds the limit."""
    fifth = LIMITS.frame // 5
    (short,) = frames(fifth, fifth, fifth, fifth, 1000)
    for more in range(-3, 6):
        told = frames(fifth, fifth, fifth, fifth, 1000 + LIMITS.frame - short + more)
        assert max(told) <= LIMITS.frame
        assert (len(told) == 1) == (more <= 0)
    # The limit also holds for a frame that follows another one.
    for more in range(-3, 6):
        told = frames(*[fifth] * 5, *[fifth] * 3, 1000 + LIMITS.frame - short + more)
        assert max(told) <= LIMITS.frame
