"""The server side of a worker session, tested without sockets."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from taskqueue_core.errors import ProtocolViolation
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import CLOSE_PROTOCOL, FEATURES, Feature, decode_server
from taskqueue_core.protocol.server_session import (
    CloseSocket,
    CreditGranted,
    Progressed,
    SendFrames,
    ServerSession,
    ServerSessionState,
    SettlementRequested,
    WorkerLeft,
)
from taskqueue_core.retry import Failed, HandBack, Rejected, RetryLater, Snoozed, Success
from tests.server.sessions import delivery, greeted, ready, refused, said, text


class TestGreeting:
    """The start of a session, from the hello of the worker to the welcome of the server."""

    def test_a_hello_is_answered_by_a_welcome(self) -> None:
        """The welcome contains the connection id, the lease and the limits, and the session is then ready."""
        session = greeted(credit=3)
        (frame,) = said(session.welcome("c1", 15.0, "1.2"))
        assert frame["connection_id"] == "c1"
        assert frame["lease"] == 15.0
        assert frame["limits"]["credit"] == LIMITS.credit
        assert session.state is ServerSessionState.READY
        assert session.credit == 3

    def test_what_was_adopted_is_held_and_the_rest_revoked(self) -> None:
        """Fault G13: after a reconnect, a worker learns for each receipt whether it still holds the delivery."""
        session = greeted(credit=1, holding=["a", "b", "b", "c"])
        welcome, revoke = said(session.welcome("c1", 15.0, "1", [delivery("b")]))
        assert welcome["adopted"] == ["b"]
        assert revoke == {"type": "revoke", "receipts": ["a", "c"]}
        assert session.busy == 1
        assert isinstance(session.feed(text("ack", receipts=["b"]))[0], SettlementRequested)

    def test_features_of_both_sides_are_exchanged(self) -> None:
        """A worker that names no features has none, names of a newer version are ignored, and the list is bounded."""
        assert greeted().features == frozenset()
        session = greeted(features=["timeouts", "of_the_future"])
        assert session.features == {Feature.TIMEOUTS}
        (frame,) = said(session.welcome("c1", 15.0, "1"))
        assert frame.get("features", []) == list(FEATURES)
        names = [f"f{n}" for n in range(LIMITS.features + 1)]
        assert greeted(features=names[1:]).features == frozenset()
        for wrong in (names, ["x" * (LIMITS.name + 1)], [1], "timeouts"):
            hello = text("hello", worker_id="w", keys=["k"], features=wrong)
            refused(ServerSession().feed(hello), "invalid_frame")

    def test_a_second_hello_ends_it(self) -> None:
        """Fault G10: a second hello ends the session, because a worker subscribes only once."""
        refused(ready().feed(text("hello", worker_id="w", keys=["k"])), "unexpected")
        waiting = greeted()
        refused(waiting.feed(text("hello", worker_id="w", keys=["k"])), "unexpected")
        assert waiting.welcome("c", 15.0, "1") == []

    @pytest.mark.parametrize(
        "frame",
        [text("credit", n=1), text("ack", receipts=["a"]), text("ping"), text("bye")],
    )
    def test_nothing_comes_before_the_hello(self, frame: str) -> None:
        """Fault G9: a frame in the wrong state ends the session, and the error says what was expected."""
        session = ServerSession()
        events = session.feed(frame)
        refused(events, "unexpected")
        assert said(events)[0]["message"] == "the first frame must be hello"
        early = greeted().feed(frame)
        refused(early, "unexpected")
        assert said(early)[0]["message"] == "this frame or call is not possible in the state new"

    def test_another_version_is_refused(self) -> None:
        """An unsupported protocol version is refused with its own error code, so that the worker can recognise it."""
        events = ServerSession().feed(text("hello", worker_id="w", keys=["k"], protocol=2))
        refused(events, "unsupported_protocol")

    @pytest.mark.parametrize(
        "hello",
        [
            {"worker_id": "", "keys": ["k"]},
            {"worker_id": "a b", "keys": ["k"]},
            {"worker_id": "w\n", "keys": ["k"]},
            {"worker_id": "{w}", "keys": ["k"]},
            {"worker_id": "w" * 201, "keys": ["k"]},
            {"worker_id": "w", "keys": []},
            {"worker_id": "w", "keys": [""]},
            {"worker_id": "w", "keys": ["\x1b[31m"]},
            {"worker_id": "w", "keys": ["k", "../etc"]},
            {"worker_id": "w", "keys": ["k"] * 1001},
            {"worker_id": "w", "keys": "k"},
            {"worker_id": "w", "keys": ["k"], "credit": -1},
            {"worker_id": "w", "keys": ["k"], "credit": 10_001},
            {"worker_id": "w", "keys": ["k"], "token": "t" * 1025},
            {"worker_id": "w"},
            {},
        ],
    )
    def test_bad_names_and_numbers_are_refused(self, hello: dict[str, Any]) -> None:
        """Faults G9, G10 and K2: a hello with invalid names, keys or numbers is refused.

        The error does not repeat the invalid value.
        """
        events = ServerSession().feed(text("hello", **hello))
        refused(events, "invalid_frame")
        (frame,) = said(events)
        assert "etc" not in frame["message"]
        assert "\x1b" not in frame["message"]

    def test_the_server_cannot_welcome_twice_or_unasked(self) -> None:
        """A server that sends a second welcome, or one without a hello, raises `ProtocolViolation`."""
        with pytest.raises(ProtocolViolation):
            ServerSession().welcome("c", 15.0, "1")
        with pytest.raises(ProtocolViolation):
            ready().welcome("c", 15.0, "1")


class TestCredit:
    """A worker never gets more deliveries than it has requested by credit."""

    def test_each_delivery_uses_one(self) -> None:
        """Each delivery uses one credit, and grants add up."""
        session = ready(2)
        session.deliver([delivery("a")])
        assert session.credit == 1
        assert session.feed(text("credit", n=5)) == [CreditGranted(5)]
        assert session.credit == 6

    def test_more_deliveries_than_credit_are_not_sent(self) -> None:
        """Fault G1: a batch of deliveries beyond the credit is refused as a whole."""
        session = ready(1)
        with pytest.raises(ProtocolViolation):
            session.deliver([delivery("a"), delivery("b")])
        assert session.busy == 0

    def test_settling_gives_no_credit_back(self) -> None:
        """Settling a delivery grants no new credit, because only the worker knows when it has capacity."""
        session = ready(0, "a")
        session.feed(text("ack", receipts=["a"]))
        session.settled({"a": True})
        assert session.credit == 0

    def test_the_total_is_limited(self) -> None:
        """Held deliveries and credit together must not exceed the limit."""
        session = ready(LIMITS.credit - 1, "a")
        refused(session.feed(text("credit", n=1)), "too_much_credit")
        many = [f"r{i}" for i in range(11)]
        hello = text("hello", worker_id="w", keys=["k"], credit=LIMITS.credit - 10, holding=many)
        refused(ServerSession().feed(hello), "too_much_credit")

    @pytest.mark.parametrize("n", [0, -1, 10_001, 1.5, "1", None, True])
    def test_odd_grants_are_refused(self, n: object) -> None:
        """Fault G9: a grant that is not a positive integer within the limit is refused."""
        refused(ready().feed(text("credit", n=n)), "invalid_frame")

    def test_none_is_left_while_draining(self) -> None:
        """A draining session has no credit and refuses deliveries."""
        session = ready(5)
        session.drain(1.0)
        assert session.credit == 0
        with pytest.raises(ProtocolViolation):
            session.deliver([delivery("a")])


class TestSettling:
    """Each receipt is settled exactly once."""

    def test_every_verb(self) -> None:
        """REV-E1: each kind of settlement frame is reported as an outcome of its own type."""
        session = ready(0, "a", "b", "c", "d", "e", "f")
        held = {d.receipt: d for d in session.held}
        acked = session.feed('{"type":"ack","receipts":["a"],"results":{"a":[1, 2],"x":3}}')
        assert acked == [SettlementRequested([(held["a"], Success(b"[1, 2]"))])]
        assert session.feed(text("redeliver", receipts=["b"])) == [
            SettlementRequested([(held["b"], HandBack())])
        ]
        assert session.feed(text("retry", receipt="c", error="e", delay=2)) == [
            SettlementRequested([(held["c"], RetryLater(2.0, "e"))])
        ]
        assert session.feed(text("dead_letter", receipt="d", reason="r", traceback="T")) == [
            SettlementRequested([(held["d"], Rejected("r", None, "T"))])
        ]
        assert session.feed(text("retry", receipt="e", error="e", traceback="T")) == [
            SettlementRequested([(held["e"], Failed("e", "T"))])
        ]
        assert session.feed(text("retry", receipt="f", delay=2, free=True)) == [
            SettlementRequested([(held["f"], Snoozed(2.0))])
        ]
        assert session.held == ()
        assert session.busy == 6

    @pytest.mark.parametrize(
        "frame",
        [
            text("ack", receipts=["no", "ne"]),
            text("redeliver", receipts=["no", "ne"]),
            text("retry", receipt="no"),
            text("dead_letter", receipt="no", reason="r"),
            text("progress", receipt="no", value=0.5),
        ],
    )
    def test_unknown_receipts_change_nothing(self, frame: str) -> None:
        """Law 2 and fault G5: a receipt that this session does not hold is answered as lost and changes nothing."""
        session = ready(3, "a")
        (answer,) = said(session.feed(frame))
        assert answer["type"] == "settled"
        assert set(answer["lease_lost"]) <= {"no", "ne"}
        assert "ok" not in answer
        assert (session.credit, session.busy) == (3, 1)

    def test_a_mixed_batch_is_parted(self) -> None:
        """In one ack, held receipts are settled, unknown ones are answered as lost, and repeats are ignored."""
        events = ready(0, "a").feed(text("ack", receipts=["a", "x", "a"]))
        assert [type(event) for event in events] == [SettlementRequested, SendFrames]
        assert said(events) == [{"type": "settled", "lease_lost": ["x"]}]

    def test_twice_is_once(self) -> None:
        """Fault G5: a second settlement shares the response of the first one while that is in progress.

        After the response, the receipt is unknown.
        """
        session = ready(0, "a")
        session.feed(text("ack", receipts=["a"]))
        assert session.feed(text("redeliver", receipts=["a"])) == []
        assert said(session.settled({"a": True})) == [{"type": "settled", "ok": ["a"]}]
        assert said(session.feed(text("ack", receipts=["a"])))[0]["lease_lost"] == ["a"]

    def test_revoked_receipts_are_gone(self) -> None:
        """After a revoke, settling the receipt is answered as lost.

        A settlement that was already in progress is not revoked.
        """
        session = ready(0, "a", "b")
        session.feed(text("ack", receipts=["b"]))
        assert said(session.revoke(["a", "b", "x"])) == [{"type": "revoke", "receipts": ["a"]}]
        assert said(session.feed(text("ack", receipts=["a"])))[0]["lease_lost"] == ["a"]
        assert session.busy == 1

    def test_moved_receipts_are_gone_without_a_word(self) -> None:
        """Receipts that moved to another connection of the same worker are removed without a frame to the worker."""
        session = ready(0, "a")
        session.forget(["a", "x"])
        assert session.busy == 0

    def test_progress_settles_nothing(self) -> None:
        """Progress is a number from 0 to 1 or a text, and does not settle the delivery."""
        session = ready(0, "a")
        (held,) = session.held
        assert session.feed(text("progress", receipt="a", value=0.5)) == [Progressed(held, 0.5)]
        assert session.feed(text("progress", receipt="a", value="x")) == [Progressed(held, "x")]
        assert session.held == (held,)
        refused(session.feed(text("progress", receipt="a", value=1.5)), "invalid_frame")

    def test_progress_of_what_is_being_settled(self) -> None:
        """Progress of a delivery whose settlement is in progress is ignored, and the receipt is not lost (fault M5)."""
        session = ready(0, "a")
        session.feed(text("ack", receipts=["a"]))
        assert session.feed(text("progress", receipt="a", value=0.5)) == []

    def test_a_result_that_is_too_large_is_refused(self) -> None:
        """A result beyond the size limit is refused, even if the frame is within its limit."""
        frame = text("ack", receipts=["a"], results={"a": "x" * LIMITS.result})
        refused(ready(0, "a").feed(frame), "invalid_frame")

    def test_room_in_bytes(self) -> None:
        """Row A5: deliveries that a worker has use up `Limits.held` until they are settled, revoked or moved."""
        session = ready(LIMITS.credit)
        free = session.room
        payload = b'"' + b"x" * (LIMITS.payload - 2) + b'"'
        largest = [replace(delivery(receipt, payload), inputs=(payload,)) for receipt in "abcd"]
        session.deliver(largest)
        assert (session.room, session.credit) == (free - 4, LIMITS.credit - 4)
        session.feed(text("ack", receipts=["a", "b"]))
        assert session.room == free - 4
        session.settled({"a": True, "b": False, "other": False})
        session.revoke(["c", "b"])
        session.forget(["c"])
        assert session.room == free - 1
        session.forget(["d"])
        assert session.room == free

    def test_many_receipts_make_frames_within_the_limit(self) -> None:
        """Fault G9: responses about many receipts of maximum length are split into frames within the size limit."""
        odd = ["\u0001" * 195 + f"{i:05}" for i in range(800)]
        events = ready().feed(text("ack", receipts=odd))
        assert len(events) > 1
        for event in events:
            assert isinstance(event, SendFrames)
            assert len(event.text.encode()) <= LIMITS.frame
            decode_server(event.text)


class TestEnding:
    """The end of a session by draining or closing."""

    def test_draining_still_settles(self) -> None:
        """A drain is announced once, and outcomes are accepted until the session ends."""
        session = ready(5, "a")
        assert said(session.drain(2.0)) == [{"type": "drain", "seconds": 2.0}]
        assert session.drain(2.0) == []
        assert isinstance(session.feed(text("ack", receipts=["a"]))[0], SettlementRequested)
        assert session.settled({"a": True})
        assert session.busy == 0

    def test_bye_closes_and_keeps_the_books(self) -> None:
        """After a bye the session still lists its held deliveries, so that they can return to the queue."""
        session = ready(5, "a")
        assert session.feed(text("bye")) == [WorkerLeft()]
        assert session.state is ServerSessionState.CLOSED
        assert len(session.held) == 1

    def test_a_reason_fits_into_a_close(self) -> None:
        """A close reason is cut to the 123 bytes that fit into a close frame (fault M5)."""
        _, hangup = ready().refuse("r" * 200, "why")
        assert hangup == CloseSocket(CLOSE_PROTOCOL, "r" * 123)

    def test_a_closed_session_hears_and_says_nothing(self) -> None:
        """Fault G10: a closed session ignores incoming frames and sends nothing."""
        session = ready(5, "a", "b")
        session.feed(text("ack", receipts=["a"]))
        session.close()
        assert session.feed(text("ack", receipts=["b"])) == []
        assert session.feed(b"\xff") == []
        assert session.refuse("late", "too late") == []
        for silent in (session.settled({"a": True}), session.revoke(["b"]), session.ping()):
            assert silent == []
        assert session.degraded(ok=True) == []
        assert session.drain(1.0) == []
        assert session.busy == 0
