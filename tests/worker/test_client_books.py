"""The state of the client session under random sequences of events."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from taskqueue_core.protocol.client_session import (
    Delivered,
    Event,
    Revoked,
)
from taskqueue_core.protocol.frames import (
    Deliver,
    Hello,
    Revoke,
    SettledFrame,
)
from taskqueue_core.retry import Success
from tests.worker.fake import receipts_of, work
from tests.worker.sessions import get, ready, sent, welcome


class Books:
    """A client session, and a model of the state that it must have."""

    def __init__(self) -> None:
        """The session has a capacity of 4."""
        self.session = ready(capacity=4)
        self.running: list[str] = []
        self.zombies = 0
        """number of slots in use by handlers whose receipts are lost"""
        self.finished: set[str] = set()
        self.gone: set[str] = set()
        """receipts that are confirmed or lost"""
        self.wire: list[str] = []
        """receipts that were settled on the current connection"""
        self.count = 0

    def deliver(self, n: int) -> None:
        """Deliver ``n + 1`` tasks, whether or not the session has granted so much credit."""
        batch = [work(receipt=f"r{self.count + i}") for i in range(n + 1)]
        self.count += len(batch)
        for event in get(self.session, Deliver(deliveries=batch)):
            assert isinstance(event, Delivered)
            self.running += [delivery.receipt for delivery in event.deliveries]
        self.finished |= {delivery.receipt for delivery in batch} - set(self.running)

    def finish(self, n: int) -> None:
        """Finish a running handler, or one whose receipt is lost."""
        if self.running:
            receipt = self.running.pop(n % len(self.running))
            self.finished.add(receipt)
            self.session.finish(receipt, Success())
        elif self.zombies:
            self.zombies -= 1
            self.session.free()

    def send(self, _: int) -> None:
        """Send frames, which must settle no receipt twice on one connection."""
        new = [receipt for frame in sent(self.session) for receipt in receipts_of(frame)]
        assert not set(new) & set(self.wire)
        self.wire += new

    def confirm(self, _: int) -> None:
        """Confirm all settlements that were sent."""
        self.gone |= set(self.wire)
        assert get(self.session, SettledFrame(ok=self.wire)) == []

    def revoke(self, n: int) -> None:
        """Revoke the delivery of a running handler."""
        if self.running:
            receipt = self.running[n % len(self.running)]
            self.lose(get(self.session, Revoke(receipts=[receipt])))

    def reconnect(self, n: int) -> None:
        """Reconnect, with a server that adopts some of the held receipts."""
        self.session.disconnected()
        self.session.connected()
        (hello,) = sent(self.session)
        assert isinstance(hello, Hello)
        assert set(hello.holding) == set(self.running) | (self.finished - self.gone)
        adopted = [receipt for i, receipt in enumerate(hello.holding) if n >> i % 3 & 1]
        self.gone |= self.finished & (set(hello.holding) - set(adopted))
        self.lose(get(self.session, welcome(*adopted)))
        self.wire = []

    def resize(self, n: int) -> None:
        """Change the capacity."""
        self.session.resize(n % 5)

    def lose(self, events: list[Event]) -> None:
        """Apply the revocations among the events to the model."""
        for event in events:
            if isinstance(event, Revoked):
                self.running = [r for r in self.running if r not in event.receipts]
                self.zombies += len(event.receipts)

    def check(self) -> None:
        """Check that the capacity is never exceeded, and that every outcome is confirmed, lost or still stored."""
        assert self.session.held == len(self.running)
        assert self.session.unconfirmed == len(self.finished - self.gone)
        assert self.session.granted + len(self.running) + self.zombies <= 4


VERBS = (
    Books.deliver,
    Books.finish,
    Books.send,
    Books.confirm,
    Books.revoke,
    Books.reconnect,
    Books.resize,
)


@given(st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 7)), max_size=40))
def test_the_books_always_balance(steps: list[tuple[Callable[[Books, int], None], int]]) -> None:
    """REV-E1, fault G5: the session agrees with the model after any sequence of events."""
    books = Books()
    for verb, n in steps:
        verb(books, n)
        books.check()
