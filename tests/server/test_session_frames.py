"""Frames of the server's session: what goes out, how full they are, and what must not come in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from taskqueue_core.errors import ProtocolViolation
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import decode_client, decode_server
from taskqueue_core.protocol.server_session import (
    CloseSocket,
    CreditGranted,
    SendFrames,
    ServerSession,
    ServerSessionState,
)
from tests.server.sessions import delivery, ready, refused, said, text


class TestFrames:
    """What goes out, and what must not come in."""

    def test_large_deliveries_are_shared_out_over_frames(self) -> None:
        """Each frame is within the limit, and tells which deliveries are in it."""
        payload = b'"' + b"x" * (LIMITS.payload - 2) + b'"'
        out = list(ready(10).deliver([delivery(f"r{i}", payload) for i in range(7)]))
        assert [len(sent) for _, sent in out] == [3, 3, 1]
        for frame, sent in out:
            assert len(frame.encode()) <= LIMITS.frame
            decoded: Any = decode_server(frame)
            assert [d.receipt for d in decoded.deliveries] == [d.receipt for d in sent]

    def test_what_is_usual_is_left_out(self) -> None:
        """A first delivery of a plain task says what it is, and nothing of what it is not (fault M5)."""
        ((frame, _),) = ready(1).deliver([delivery("a")])
        assert msgspec.json.decode(frame) == {
            "type": "deliver",
            "deliveries": [
                {
                    "receipt": "a",
                    "attempt": 1,
                    "delivered_at": 1.0,
                    "task": {"id": "task-a", "key": "k", "payload": None},
                }
            ],
        }

    def test_what_was_left_out_is_usual(self) -> None:
        """A peer that names none of what may be missing means no credit, no number and no loss (fault M5)."""
        hello: Any = decode_client(text("hello", worker_id="w", keys=["k"]))
        assert (hello.credit, hello.token, hello.holding) == (0, None, [])
        ping: Any = decode_client(text("ping"))
        pong: Any = decode_client(text("pong"))
        assert (ping.n, pong.n) == (0, 0)
        degraded: Any = decode_server(text("degraded"))
        assert (degraded.ok, degraded.reason) == (False, "")
        plain = {"receipt": "a", "attempt": 1, "delivered_at": 1.0, "task": {"id": "t", "key": "k"}}
        frame: Any = decode_server(text("deliver", deliveries=[plain]))
        (wire,) = frame.deliveries
        assert (wire.losses, wire.prior, wire.shard, wire.shard_changed) == (0, 0, None, False)

    def test_a_bad_field_is_named(self) -> None:
        """Who wrote a bad frame is told which field it is, and what it should be (fault M5)."""
        (frame,) = said(ready().feed(text("credit", n=1.5)))
        assert frame["message"] == "Expected `int`, got `float` - at `$.n`"

    def test_payloads_go_out_as_they_are(self) -> None:
        """Bytes are spliced, not encoded anew."""
        ((frame, _),) = ready(1).deliver([delivery("a", b'{"z": 1.50, "a":[ ] }')])
        assert '"payload":{"z": 1.50, "a":[ ] }' in frame

    def test_an_unknown_type_is_no_reason_to_part(self) -> None:
        """It is answered, and the session goes on."""
        session = ready()
        assert said(session.feed(text("from_the_future")))[0]["code"] == "unknown_type"
        assert session.state is ServerSessionState.READY

    def test_unknown_fields_are_passed_over(self) -> None:
        """A newer worker may say more."""
        assert ready().feed(text("credit", n=1, colour="red")) == [CreditGranted(1)]

    @pytest.mark.parametrize(
        ("frame", "code"),
        [
            (b"\x00\x01", "not_text"),
            ("", "not_json"),
            ("null", "invalid_frame"),
            ("[]", "invalid_frame"),
            ("{}", "invalid_frame"),
            ('{"type":1}', "invalid_frame"),
            ('{"type":"credit","n":NaN}', "not_json"),
            ('{"type":"credit","n":1e999}', "invalid_frame"),
            ('{"type":"credit","n":' + "1" * 5000 + "}", "not_json"),
            ('{"type":"ack","receipts":["a"],"results":{"a":"\\ud800"}}', "not_json"),
            ('{"type":"ack","receipts":[' + "[" * 10_000 + "]" * 10_000 + "]}", "not_json"),
            ('{"type":"ack","receipts":["a"],"results":{"a":' + "[" * 100_000, "not_json"),
            ('{"type":"ack","receipts":[""]}', "invalid_frame"),
            ('{"type":"ack","receipts":["' + "a" * 201 + '"]}', "invalid_frame"),
            ('{"type":"retry","receipt":"a","delay":-1}', "invalid_frame"),
            ('{"type":"retry","receipt":"a","error":"' + "e" * 4097 + '"}', "invalid_frame"),
            ('{"type":"ping","pad":"' + "x" * LIMITS.frame + '"}', "too_large"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_malformed_frames_end_it(self, frame: str | bytes, code: str) -> None:
        """Fault G9: malformed input is named by a code, and ends the session."""
        session = ready(5, "a")
        events = session.feed(frame)
        assert [type(event) for event in events] == [SendFrames, CloseSocket]
        if code != "not_json":
            refused(events, code)
        assert session.state is ServerSessionState.CLOSED
        assert len(session.held) == 1

    def test_ping_is_answered_with_its_number(self) -> None:
        """However large it is."""
        session = ready()
        for n in (0, 7, 2**70, -1):
            assert said(session.feed(text("ping", n=n)))[0].get("n", 0) == n
        assert session.feed(text("pong", n=1)) == []
        assert said(session.ping()) == [{"type": "ping", "n": 1}]

    def test_degraded_and_back(self) -> None:
        """Said to those only who were welcomed."""
        session = ready()
        assert said(session.degraded(ok=False, reason="r")) == [{"type": "degraded", "reason": "r"}]
        assert said(session.degraded(ok=True)) == [{"type": "degraded", "ok": True}]
        with pytest.raises(ProtocolViolation):
            ServerSession().degraded(ok=True)
