"""Fuzz tests of the server session: random frames never raise an exception or corrupt the state.

``TASKQUEUE_FUZZ_FRAMES`` sets how many frames are sent; a failing example can be repeated with its seed.
"""

from __future__ import annotations

import os
import random
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import Hello, decode_server
from taskqueue_core.protocol.server_session import (
    CloseSocket,
    CreditGranted,
    Event,
    Greeted,
    Progressed,
    SendFrames,
    ServerSession,
    ServerSessionState,
    SettlementRequested,
    WorkerLeft,
)
from taskqueue_core.tasks import Delivery, Task

FRAMES = int(os.environ.get("TASKQUEUE_FUZZ_FRAMES", "10000"))
PER_EXAMPLE = 100
STRINGS = [
    "",
    "a",
    "k",
    "w",
    "r1",
    "\u0000",
    "\n",
    "\x1b[2J",
    "{}",
    "é",
    "😀" * 50,
    "x" * 201,
    "../",
]
KINDS = [
    "hello",
    "credit",
    "ack",
    "redeliver",
    "retry",
    "dead_letter",
    "progress",
    "ping",
    "pong",
    "bye",
    "welcome",
    "deliver",
    "settled",
    "revoke",
    "drain",
    "degraded",
    "error",
    "Hello",
    "hello\x00",
]
FIELDS = [
    "worker_id",
    "keys",
    "credit",
    "token",
    "holding",
    "protocol",
    "n",
    "receipts",
    "results",
    "receipt",
    "error",
    "delay",
    "reason",
    "value",
    "type",
    "x",
]
BROKEN = [
    "",
    "{",
    "[]",
    "null",
    "NaN",
    '{"type":',
    '"x"',
    "{" * 5000,
    "[" * 5000,
    "1e999",
    "\ud800",
]


class Driver:
    """A session, a model of the deliveries that it must hold, and a source of valid and invalid frames."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rudeness = self.random.choice([0.01, 0.05, 0.4])
        self.session = ServerSession()
        self.held: set[str] = set()
        self.pending: set[str] = set()
        self.granted = 0
        self.issued = 0
        self.greeted = False

    def any_value(self, depth: int = 0) -> Any:
        """Return a random JSON value of limited depth."""
        choice = self.random.randrange(9 if depth < 3 else 7)
        simple = [
            None,
            self.random.random() < 0.5,
            self.random.choice([0, 1, -1, 2**31, 2**63, 2**64, 10**30]),
            self.random.choice([0.5, -0.0, 1e308, 1.5]),
            self.random.choice(STRINGS),
            self.receipt(),
            self.random.randrange(20),
        ]
        if choice < 7:
            return simple[choice]
        if choice == 7:
            return [self.any_value(depth + 1) for _ in range(self.random.randrange(4))]
        return {
            self.random.choice(STRINGS): self.any_value(depth + 1)
            for _ in range(self.random.randrange(4))
        }

    def receipt(self) -> str:
        """Return a random receipt, which the session may or may not hold."""
        known = sorted(self.held | self.pending)
        if known and self.random.random() < 0.7:
            return self.random.choice(known)
        return self.random.choice(["r0", "nobody", f"r{self.random.randrange(50)}", "😀" * 50])

    def proper(self) -> dict[str, Any]:
        """Return a valid frame, which may still be wrong in the current state."""
        some = [self.receipt() for _ in range(self.random.randrange(4))]
        frames: list[dict[str, Any]] = [
            {"type": "credit", "n": self.random.randrange(1, 30)},
            {"type": "ack", "receipts": some, "results": {r: self.any_value() for r in some}},
            {"type": "redeliver", "receipts": some},
            {"type": "retry", "receipt": self.receipt(), "error": "e", "delay": 1},
            {"type": "retry", "receipt": self.receipt()},
            {"type": "dead_letter", "receipt": self.receipt(), "reason": "r"},
            {"type": "progress", "receipt": self.receipt(), "value": 0.5},
            {"type": "progress", "receipt": self.receipt(), "value": "half"},
            {"type": "ping", "n": self.random.choice([0, 5, -(2**70)])},
            {"type": "pong"},
        ]
        if self.random.random() < 0.005:
            return {"type": "bye"}
        if not self.greeted or self.random.random() < 0.003:
            return {"type": "hello", "worker_id": "w", "keys": ["k"], "credit": 5, "holding": some}
        return self.random.choice(frames)

    def data(self) -> str | bytes:
        """Return a message: a valid frame, an altered frame, or broken data."""
        if self.random.random() >= self.rudeness:
            return msgspec.json.encode(self.proper()).decode()
        kind = self.random.random()
        if kind < 0.25:
            frame = {"type": self.random.choice(KINDS)}
            for _ in range(self.random.randrange(4)):
                frame[self.random.choice(FIELDS)] = self.any_value()
        elif kind < 0.5:
            frame = self.proper()
            frame[self.random.choice(FIELDS)] = self.any_value()
        elif kind < 0.62:
            return self.random.choice(BROKEN)
        elif kind < 0.7:
            return self.random.randbytes(self.random.randrange(40))
        else:
            text = list(msgspec.json.encode(self.proper()).decode())
            for _ in range(self.random.randrange(1, 4)):
                place = self.random.randrange(len(text))
                text[place] = chr(self.random.choice([0, 34, 44, 92, 123, 125, 0xD800, 0x1F600]))
            return "".join(text)
        return msgspec.json.encode(frame).decode()

    def step(self) -> None:
        """Feed one message, perform one action of the server, and check the state of the session."""
        if self.session.state is ServerSessionState.CLOSED:
            self.check_silence()
            self.__init__(self.random.randrange(2**63))  # type: ignore[misc]
        events = self.session.feed(self.data())
        for event in events:
            self.check(event)
        self.act()
        assert 0 <= self.session.credit <= LIMITS.credit
        assert self.session.busy == len(self.held) + len(self.pending) <= LIMITS.credit
        assert {d.receipt for d in self.session.held} == self.held

    def check(self, event: Event) -> None:
        """Check an event and update the model."""
        match event:
            case SendFrames(text):
                self.check_text(text)
            case Greeted(hello):
                self.greet(hello)
            case CreditGranted(n):
                self.granted += n
            case SettlementRequested(outcomes):
                self.check_claim(tuple(delivery for delivery, _ in outcomes))
            case Progressed(delivery):
                assert delivery.receipt in self.held
            case CloseSocket(code, reason):
                assert code == 4400
                assert len(reason.encode()) <= 123
                assert reason.isascii()
            case WorkerLeft():
                pass

    def greet(self, hello: Hello) -> None:
        """Welcome the worker, which must not have been welcomed before, and adopt a random part of its receipts."""
        assert not self.greeted
        self.greeted = True
        adopted = [r for r in dict.fromkeys(hello.holding) if self.random.random() < 0.5]
        for text in self.session.welcome("c", 15.0, "1", [self.delivery(r) for r in adopted]):
            self.check_text(text)
        self.held = set(adopted)
        self.granted = hello.credit

    def check_claim(self, deliveries: tuple[Delivery, ...]) -> None:
        """Check that only held deliveries are settled, each once."""
        receipts = [d.receipt for d in deliveries]
        assert receipts
        assert len(set(receipts)) == len(receipts)
        assert self.held.issuperset(receipts), "a delivery was settled that is not held"
        self.held.difference_update(receipts)
        self.pending.update(receipts)

    def check_text(self, text: str) -> None:
        """Check that a frame is within the size limit and can be decoded."""
        assert len(text.encode()) <= LIMITS.frame
        decode_server(text)

    def check_silence(self) -> None:
        """Check that a closed session ignores messages and sends nothing."""
        assert self.session.feed(self.data()) == []
        assert self.session.ping() == []

    def delivery(self, receipt: str) -> Delivery:
        """Return a delivery with this receipt."""
        return Delivery(task=Task(key="k", id="t"), receipt=receipt, attempt=1, delivered_at=1.0)

    def act(self) -> None:
        """Perform a random action of the server: deliver, settle, revoke or drain."""
        if not self.greeted or self.session.state is ServerSessionState.CLOSED:
            return
        texts: list[str] = []
        act = self.random.random()
        if act < 0.3 and self.session.state is ServerSessionState.READY and self.session.credit:
            count = self.random.randrange(1, min(self.session.credit, 8) + 1)
            receipts = [f"r{self.issued + i}-{self.random.randrange(9)}" for i in range(count)]
            self.issued += count
            for text, _ in self.session.deliver([self.delivery(r) for r in receipts]):
                texts.append(text)
            self.held.update(receipts)
            self.granted -= count
            assert self.granted >= 0
        elif act < 0.5 and self.pending:
            done = self.random.sample(
                sorted(self.pending), self.random.randint(1, len(self.pending))
            )
            texts += self.session.settled({r: self.random.random() < 0.8 for r in done})
            self.pending.difference_update(done)
        elif act < 0.55 and self.held:
            gone = [self.random.choice(sorted(self.held)), "nobody"]
            texts += self.session.revoke(gone)
            self.held.difference_update(gone)
        elif act < 0.551:
            texts += self.session.drain(1.0)
        for text in texts:
            self.check_text(text)


@settings(
    max_examples=max(1, FRAMES // PER_EXAMPLE),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(0, 2**63), st.just(PER_EXAMPLE) | st.integers(1, PER_EXAMPLE))
def test_no_frame_does_harm(seed: int, frames: int) -> None:
    """Fault G9: no frame raises an exception in any state, and the session agrees with the model.

    Only held deliveries are settled, the credit is never negative, and every response can be decoded and is within
    the size limit.
    """
    driver = Driver(seed)
    for _ in range(frames):
        driver.step()
