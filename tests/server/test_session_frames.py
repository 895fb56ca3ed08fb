"""The frames that a server session sends, and the frames that it refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from taskqueue_core.after import After, TaskRef
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
from taskqueue_core.tasks import Delivery, Task
from taskqueue_core.uniqueness import UniqueKey
from tests.server.sessions import delivery, ready, refused, said, text


class TestFrames:
    """Encoding of outgoing frames and validation of incoming ones."""

    def test_large_deliveries_are_shared_out_over_frames(self) -> None:
        """Large deliveries are split into several frames within the size limit, each with its list of deliveries."""
        payload = b'"' + b"x" * (LIMITS.payload - 2) + b'"'
        out = list(ready(10).deliver([delivery(f"r{i}", payload) for i in range(7)]))
        assert [len(sent) for _, sent in out] == [3, 3, 1]
        for frame, sent in out:
            assert len(frame.encode()) <= LIMITS.frame
            decoded: Any = decode_server(frame)
            assert [d.receipt for d in decoded.deliveries] == [d.receipt for d in sent]

    def test_the_largest_delivery_fits_into_a_frame(self) -> None:
        """U16: the largest payload and headers, with 1000 parents with the longest names and their results."""
        text = b'"' + b"x" * (LIMITS.payload - 2) + b'"'
        long = [f"{number:x<{LIMITS.name}}" for number in range(LIMITS.parents)]
        parents = tuple(TaskRef(name, name) for name in long)
        after = After(tasks=parents, inputs=tuple(range(LIMITS.parents)))
        headers = {f"{n}": '"' * (LIMITS.header_bytes // 33) for n in range(LIMITS.headers)}
        task = Task(
            key="k" * LIMITS.name, id=long[1], payload=text, after=after, batch=parents[0],
            tenant=long[0], ordering_key=long[2], headers=headers, priority=9, not_before=1.5,
            deadline=253402300799.123, unique=UniqueKey(key=long[3], until="started", period=1e9),
        )  # fmt: skip
        first = b'"' + b"x" * (LIMITS.payload - 4 * LIMITS.parents) + b'"'
        inputs = (first, *[b"null"] * (LIMITS.parents - 1))
        largest = Delivery(
            task=task, receipt=long[4], attempt=9999, losses=9999, prior=9999, delivered_at=1e10 / 7,
            shard=999, shard_changed=True, timeout=1e9, inputs=inputs,
        )  # fmt: skip
        ((frame, _),) = ready(1).deliver([largest])
        assert 0.9 * LIMITS.frame < len(frame.encode()) <= LIMITS.frame
        decoded: Any = decode_server(frame)
        assert len(decoded.deliveries[0].inputs) == LIMITS.parents

    def test_what_is_usual_is_left_out(self) -> None:
        """A frame omits every field that has its default value (fault M5)."""
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
        """A missing optional field of a frame has its default value: no credit, number 0 and no losses (fault M5)."""
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
        """The error about a bad frame names the field and the expected type (fault M5)."""
        (frame,) = said(ready().feed(text("credit", n=1.5)))
        assert frame["message"] == "Expected `int`, got `float` - at `$.n`"

    def test_payloads_go_out_as_they_are(self) -> None:
        """The bytes of a payload are copied into the frame unchanged."""
        ((frame, _),) = ready(1).deliver([delivery("a", b'{"z": 1.50, "a":[ ] }')])
        assert '"payload":{"z": 1.50, "a":[ ] }' in frame

    def test_an_unknown_type_is_no_reason_to_part(self) -> None:
        """A frame of unknown type is answered with an error, and the session continues."""
        session = ready()
        assert said(session.feed(text("from_the_future")))[0]["code"] == "unknown_type"
        assert session.state is ServerSessionState.READY

    def test_unknown_fields_are_passed_over(self) -> None:
        """Unknown fields of a frame are ignored, because a newer worker may send them."""
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
        """Fault G9: a malformed frame is answered with an error code and ends the session."""
        session = ready(5, "a")
        events = session.feed(frame)
        assert [type(event) for event in events] == [SendFrames, CloseSocket]
        if code != "not_json":
            refused(events, code)
        assert session.state is ServerSessionState.CLOSED
        assert len(session.held) == 1

    def test_ping_is_answered_with_its_number(self) -> None:
        """A ping is answered with a pong of the same number, however large the number is."""
        session = ready()
        for n in (0, 7, 2**70, -1):
            assert said(session.feed(text("ping", n=n)))[0].get("n", 0) == n
        assert session.feed(text("pong", n=1)) == []
        assert said(session.ping()) == [{"type": "ping", "n": 1}]

    def test_degraded_and_back(self) -> None:
        """Only a welcomed session can be notified of an outage and of its end."""
        session = ready()
        assert said(session.degraded(ok=False, reason="r")) == [{"type": "degraded", "reason": "r"}]
        assert said(session.degraded(ok=True)) == [{"type": "degraded", "ok": True}]
        with pytest.raises(ProtocolViolation):
            ServerSession().degraded(ok=True)
