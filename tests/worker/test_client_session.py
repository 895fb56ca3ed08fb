"""The client session without a socket: incoming frames, outgoing frames and its state."""

from __future__ import annotations

import msgspec
import pytest

from taskqueue_core.errors import ProtocolViolation
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.client_session import (
    ClientSession,
    ClientSessionState,
    Complained,
    Delivered,
    Draining,
    Revoked,
    StoreChanged,
    Welcomed,
)
from taskqueue_core.protocol.frames import (
    FEATURES,
    AckFrame,
    Bye,
    Credit,
    DeadLetterFrame,
    Degraded,
    Deliver,
    Drain,
    Error,
    Feature,
    Hello,
    Ping,
    Pong,
    Progress,
    RedeliverFrame,
    RetryFrame,
    Revoke,
    ServerFrame,
    SettledFrame,
    Welcome,
    WireLimits,
    decode_client,
    encode,
)
from taskqueue_core.protocol.settlements import _ENVELOPE, _PER_RECEIPT, frames_of
from taskqueue_core.retry import Failed, HandBack, Outcome, Rejected, RetryLater, Snoozed, Success
from tests.worker.fake import receipts_of, work
from tests.worker.sessions import get, ready, reconnected, sent, welcome


def test_work_settlement_and_credit_go_round() -> None:
    """REV-E1: an outcome is stored until the server confirms it, and a free slot grants new credit."""
    session = ready()
    one, two = work(receipt="r1"), work(receipt="r2")
    assert get(session, Deliver(deliveries=[one, two])) == [Delivered([one, two])]
    assert (session.held, session.granted) == (2, 1)
    session.finish("r1", Success(b"1"))
    assert sent(session) == [
        AckFrame(receipts=["r1"], results={"r1": msgspec.Raw(b"1")}),
        Credit(n=1),
    ]
    assert sent(session) == []
    assert session.unconfirmed == 1
    assert get(session, SettledFrame(ok=["r1"])) == []
    assert session.unconfirmed == 0
    assert session.settle("r2", Failed("broken"))
    assert sent(session) == [RetryFrame(receipt="r2", error="broken")]
    session.free()
    assert sent(session) == [Credit(n=1)]


def test_each_outcome_has_its_frame() -> None:
    """Each outcome is sent as its own frame type; acks and releases are sent in batches.

    Texts are cut to the limit, and characters that cannot be encoded are replaced.
    """
    session = ready(capacity=9)
    get(session, Deliver(deliveries=[work(receipt=f"r{n}") for n in range(9)]))
    outcomes: list[Outcome] = [
        Success(),
        HandBack(),
        RetryLater(2.5, "soon"),
        Snoozed(1.5),
        Failed("\ud800" + "x" * 9999),
        Rejected("no", "why"),
        Rejected("no"),
        HandBack(),
        Success(),
    ]
    for number, outcome in enumerate(outcomes):
        session.settle(f"r{number}", outcome)
    assert sent(session) == [
        RetryFrame(receipt="r2", error="soon", delay=2.5),
        RetryFrame(receipt="r3", error="snoozed", delay=1.5),
        RetryFrame(receipt="r4", error="?" + "x" * (LIMITS.text - 1)),
        DeadLetterFrame(receipt="r5", reason="no", error="why"),
        DeadLetterFrame(receipt="r6", reason="no"),
        AckFrame(receipts=["r0", "r8"]),
        RedeliverFrame(receipts=["r1", "r7"]),
    ]


def test_a_snooze_needs_its_feature() -> None:
    """A server that has the feature gets a retry that counts no attempt; another one gets a plain retry (U5)."""
    outcomes: list[tuple[str, Outcome]] = [("r1", Snoozed(1.5))]
    assert list(frames_of(outcomes, WireLimits(), [Feature.SNOOZE])) == [
        RetryFrame(receipt="r1", delay=1.5, free=True)
    ]
    assert list(frames_of(outcomes, WireLimits(), [])) == [
        RetryFrame(receipt="r1", error="snoozed", delay=1.5)
    ]


def test_tracebacks_need_their_feature() -> None:
    """A server that stores tracebacks gets the ends of them; another one gets frames without the field (U10)."""
    long = "x" * LIMITS.traceback + "end"
    outcomes: list[tuple[str, Outcome]] = [
        ("r1", Failed("e", long)),
        ("r2", RetryLater(1, "e", "T")),
        ("r3", Rejected("no", None, "T")),
    ]
    found = list(frames_of(outcomes, WireLimits(), [Feature.TRACEBACKS]))
    assert found == [
        RetryFrame(receipt="r1", error="e", traceback=long[-LIMITS.traceback :]),
        RetryFrame(receipt="r2", error="e", delay=1, traceback="T"),
        DeadLetterFrame(receipt="r3", reason="no", traceback="T"),
    ]
    for frame in frames_of(outcomes, WireLimits(), []):
        assert "traceback" not in encode(frame)


def test_a_reconnect_repeats_nothing_and_loses_nothing() -> None:
    """After a reconnect, the hello names all held and unconfirmed receipts.

    Unconfirmed outcomes of adopted receipts are sent again; other receipts are revoked or dropped.
    """
    session = ready(capacity=5)
    get(session, Deliver(deliveries=[work(receipt=f"r{n}") for n in range(5)]))
    session.finish("r0", Success())
    session.finish("r1", Success())
    assert len(sent(session)) == 2
    session.finish("r2", Failed("x"))
    hello, events = reconnected(session, "r1", "r2", "r3")
    assert hello.holding == ["r3", "r4", "r0", "r1", "r2"]
    assert hello.credit == 3
    assert events == [Welcomed("c1", 3, 2), Revoked(["r4"])]
    assert sent(session) == [RetryFrame(receipt="r2", error="x"), AckFrame(receipts=["r1"])]
    get(session, SettledFrame(ok=["r1"], lease_lost=["r2"]))
    assert (session.unconfirmed, session.held) == (0, 1)
    assert not session.settle("r4", Success())
    assert reconnected(session, "r3")[0].holding == ["r3"]
    assert sent(session) == []


def test_a_stale_receipt_is_dropped() -> None:
    """REV-E1: when the server reports a lease as lost, its outcome is dropped and its running task is revoked."""
    session = ready()
    get(session, Deliver(deliveries=[work(receipt="r1"), work(receipt="r2")]))
    assert session.settle("r1", Success())
    assert get(session, SettledFrame(lease_lost=["r1", "r2", "r9"])) == [Revoked(["r2"])]
    assert get(session, Revoke(receipts=["r2"])) == []
    assert not session.settle("r2", Success())
    assert sent(session) == []  # a slot is free only after its handler has ended
    session.free()
    session.free()
    assert sent(session) == [Credit(n=2)]


def test_what_exceeds_the_capacity_goes_back() -> None:
    """A delivery beyond the capacity is released at once, without using up an attempt."""
    session = ready(capacity=2)
    session.resize(1)
    get(session, Deliver(deliveries=[work(receipt="r1"), work(receipt="r2")]))
    assert sent(session) == [RedeliverFrame(receipts=["r2"])]
    session.resize(0)
    session.finish("r1", Success())
    assert sent(session) == [AckFrame(receipts=["r1"])]
    assert get(session, Deliver(deliveries=[work(receipt="r3")])) == []
    assert sent(session) == [RedeliverFrame(receipts=["r3"])]
    session.resize(2)
    assert sent(session) == [Credit(n=2)]


def test_the_same_delivery_twice_is_one() -> None:
    """A receipt that is already held, or whose outcome is being sent, is not run again.

    Each delivery of it uses up credit, though.
    """
    session = ready()
    one = work(receipt="r1")
    assert get(session, Deliver(deliveries=[one, one])) == [Delivered([one])]
    session.settle("r1", Success())
    assert get(session, Deliver(deliveries=[one])) == []
    assert sent(session) == [AckFrame(receipts=["r1"]), Credit(n=2)]


def test_batches_stay_within_the_limits() -> None:
    """Frames stay within the server's limits on bytes and on the number of receipts."""
    session = ready(capacity=100, batch=30, frame=4000)
    get(session, Deliver(deliveries=[work(receipt=f"r{n}") for n in range(100)]))
    for number in range(100):
        outcome = HandBack() if number < 40 else Success(b'"' + b"x" * 100 + b'"')
        session.finish(f"r{number}", outcome)
    texts = list(session.outgoing())
    frames = [decode_client(text) for text in texts]
    assert max(map(len, texts)) <= 4000
    assert max(len(receipts_of(frame)) for frame in frames) <= 30
    settled = [receipt for frame in frames for receipt in receipts_of(frame)]
    assert sorted(settled) == sorted(f"r{n}" for n in range(100))


@pytest.mark.parametrize("result", [None, b'"' + b"x" * 500 + b'"'])
def test_acks_fill_their_frames(result: bytes | None) -> None:
    """A frame contains as many acks as fit into its size limit (fault M5).

    An ack that is too large for any frame is sent alone.
    """
    receipts = [f"{n:0100}" for n in range(10)]
    cost = len(receipts[0]) + _PER_RECEIPT + (0 if result is None else 100 + len(result))
    for count in range(1, 5):
        limits = WireLimits(frame=_ENVELOPE + count * cost)
        frames = list(frames_of([(receipt, Success(result)) for receipt in receipts], limits))
        assert [len(receipts_of(frame)) for frame in frames[:-1]] == [count] * (9 // count)
        assert [receipt for frame in frames for receipt in receipts_of(frame)] == receipts
        assert max(len(encode(frame)) for frame in frames) <= limits.frame
    alone = frames_of([(receipt, Success(result)) for receipt in receipts], WireLimits(frame=1))
    assert len(list(alone)) == 10


def test_a_server_may_want_one_at_a_time() -> None:
    """A server may limit a batch to a single receipt (fault M5)."""
    outcomes: list[tuple[str, Outcome]] = [
        ("a", Success()), ("b", HandBack()), ("c", Success()), ("d", HandBack())
    ]  # fmt: skip
    assert list(frames_of(outcomes, WireLimits(batch=1))) == [
        AckFrame(receipts=["a"]),
        AckFrame(receipts=["c"]),
        RedeliverFrame(receipts=["b"]),
        RedeliverFrame(receipts=["d"]),
    ]


def test_progress_is_merged_and_ends_with_the_outcome() -> None:
    """Only the last progress of each receipt is sent, and none for receipts that are settled or unknown."""
    session = ready()
    get(session, Deliver(deliveries=[work(receipt="r1"), work(receipt="r2")]))
    for value in (0.1, 0.2):
        session.progress("r1", value)
    session.progress("r2", "text")
    session.progress("r9", 1.0)
    session.settle("r2", Success())
    assert sent(session) == [Progress(receipt="r1", value=0.2), AckFrame(receipts=["r2"])]


def test_pings_go_both_ways() -> None:
    """A ping is answered as soon as there is a connection, even before the welcome."""
    session = ClientSession("w", ["a"], 1)
    session.connected()
    get(session, Ping(n=7))
    assert sent(session) == [
        Hello(worker_id="w", keys=["a"], credit=1, features=list(FEATURES)),
        Pong(n=7),
    ]
    get(session, welcome())
    session.ping()
    session.ping()
    assert sent(session) == [Ping(n=1)]
    assert get(session, Pong(n=1)) == []
    assert sent(session) == []
    session.ping()
    assert sent(session) == [Ping(n=2)]


def test_who_is_not_connected_says_nothing() -> None:
    """A session without a connection sends nothing.

    A ping that was due on the last connection is not sent on the next one (fault M5).
    """
    session = ClientSession("w", ["a"], 1)
    assert sent(session) == []
    session = ready()
    session.ping()
    session.disconnected()
    assert sent(session) == []
    reconnected(session)
    assert sent(session) == []


def test_a_draining_server_gets_outcomes_and_no_credit() -> None:
    """A draining server still gets outcomes, but no new credit; the next connection starts with full credit."""
    session = ready()
    get(session, Deliver(deliveries=[work(receipt="r1")]))
    assert get(session, Drain(seconds=3.0)) == [Draining(3.0)]
    session.finish("r1", Success())
    assert sent(session) == [AckFrame(receipts=["r1"])]
    assert reconnected(session)[0].credit == 3


def test_bye_comes_last_and_closes() -> None:
    """A bye is the last frame; a closed session sends and receives nothing and cannot connect again."""
    session = ready()
    get(session, Deliver(deliveries=[work(receipt="r1")]))
    session.resize(0)
    session.finish("r1", Success())
    session.bye()
    assert sent(session) == [AckFrame(receipts=["r1"]), Bye()]
    assert session.state is ClientSessionState.CLOSED
    assert sent(session) == []
    session.disconnected()
    with pytest.raises(ProtocolViolation, match="closed"):
        session.connected()
    with pytest.raises(ProtocolViolation, match="closed"):
        get(session, Ping())


def test_other_frames_are_events() -> None:
    """Frames about outages and errors are reported as events, with their texts cut to a maximum length."""
    session = ready()
    assert get(session, Degraded(reason="down")) == [StoreChanged(ok=False, reason="down")]
    assert get(session, Degraded(ok=True)) == [StoreChanged(ok=True, reason="")]
    assert get(session, Error(code="c" * 99, message="m" * 999)) == [
        Complained("c" * 50, "m" * 200)
    ]


@pytest.mark.parametrize(
    "frame", [Deliver(deliveries=[]), SettledFrame(), Revoke(receipts=["r"]), Drain(seconds=1.0)]
)
def test_frames_before_the_welcome_are_refused(frame: ServerFrame) -> None:
    """A frame that is not allowed before the welcome raises `ProtocolViolation`."""
    session = ClientSession("w", ["a"], 1)
    with pytest.raises(ProtocolViolation, match="connecting"):
        get(session, frame)
    session.connected()
    sent(session)
    if not isinstance(frame, Revoke):
        with pytest.raises(ProtocolViolation, match="greeting") as caught:
            get(session, frame)
        assert caught.value.fatal


def test_a_welcome_is_expected_once_and_after_the_hello() -> None:
    """A welcome that comes twice, before the hello, or with an invalid lease is a protocol violation."""
    session = ready()
    with pytest.raises(ProtocolViolation, match="ready"):
        get(session, welcome())
    session = ClientSession("w", ["a"], 1)
    session.connected()
    with pytest.raises(ProtocolViolation, match="before a hello"):
        get(session, welcome())
    sent(session)
    with pytest.raises(ProtocolViolation, match="lease"):
        get(session, Welcome(connection_id="c", lease=0.0, server="x"))
    assert session.limits == WireLimits()
    get(session, Welcome(connection_id="c", lease=0.5, server="x", limits=WireLimits(result=9)))
    assert (session.lease, session.limits.result) == (0.5, 9)


def test_features_of_both_sides_are_exchanged() -> None:
    """A hello names the worker's features; a server without the field has none, also after a reconnect to it."""
    session = ClientSession("w", ["a"], 1)
    session.connected()
    (hello,) = sent(session)
    assert isinstance(hello, Hello)
    assert hello.features == list(FEATURES)
    newer = ["snooze", "of_the_future"]
    get(session, Welcome(connection_id="c", lease=1.0, server="x", features=newer))
    assert session.features == {Feature.SNOOZE}
    reconnected(session)
    assert session.features == frozenset()


def test_an_unknown_frame_is_passed_over() -> None:
    """Fault A13: a frame of unknown type is not fatal, because a newer server may send it.

    Malformed text is fatal.
    """
    session = ready()
    with pytest.raises(ProtocolViolation) as caught:
        session.receive('{"type":"newer","x":1}')
    assert not caught.value.fatal
    assert get(session, Ping(n=1)) == []
    for text in ("[]", "{", '{"type":"deliver"}', "\x00"):
        with pytest.raises(ProtocolViolation) as caught:
            session.receive(text)
        assert caught.value.fatal


def test_unconfirmed_outcomes_bound_the_credit() -> None:
    """Fault B7: unconfirmed outcomes reduce the credit, so that one hello can always name all receipts."""
    session = ready(capacity=LIMITS.credit)
    for start in range(0, LIMITS.credit, 1000):
        batch = [work(receipt=f"r{n}") for n in range(start, start + 1000)]
        get(session, Deliver(deliveries=batch))
    for number in range(LIMITS.credit - 10):
        session.finish(f"r{number}", Success())
    assert {type(frame) for frame in sent(session)} == {AckFrame}
    get(session, SettledFrame(ok=["r1", "r2"]))
    assert sent(session) == [Credit(n=2)]
