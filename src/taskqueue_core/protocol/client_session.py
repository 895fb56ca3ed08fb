"""The worker's side of the socket protocol, without I/O: it reads and writes frames as text.

::

    connecting ─ connected ─> greeting ─ welcome ─> ready ─ drain ─> draining
        ^                        │                    │                  │
        └───────────── disconnected ──────────────────┴──────────────────┘     bye ─> closed

One session lasts over many connections. It tracks which receipts are held, how much credit the server has left, and
which outcomes the server has not confirmed, so that the worker can resume after a reconnect. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum

import msgspec

from taskqueue_core.errors import ProtocolViolation
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol import frames
from taskqueue_core.protocol.outgoing_events import OutgoingEvents
from taskqueue_core.protocol.settlements import frames_of
from taskqueue_core.retry import HandBack, Outcome


class ClientSessionState(StrEnum):
    """The states of a `ClientSession`."""

    CONNECTING = "connecting"
    GREETING = "greeting"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


class Welcomed(msgspec.Struct, frozen=True):
    """The server accepted the hello."""

    connection_id: str
    adopted: int
    lost: int


class Delivered(msgspec.Struct, frozen=True):
    """New deliveries, each of which takes up capacity of the worker."""

    deliveries: Sequence[frames.WireDelivery]


class Revoked(msgspec.Struct, frozen=True):
    """Receipts of running deliveries that no longer belong to this worker."""

    receipts: Sequence[str]


class Draining(msgspec.Struct, frozen=True):
    """The server is shutting down."""

    seconds: float


class StoreChanged(msgspec.Struct, frozen=True):
    """The server's store has become unavailable, or available again."""

    ok: bool
    reason: str


class Complained(msgspec.Struct, frozen=True):
    """The server did not accept a frame."""

    code: str
    message: str


_OPEN = (ClientSessionState.READY, ClientSessionState.DRAINING)
_CONNECTED = (ClientSessionState.GREETING, *_OPEN)
Event = Welcomed | Delivered | Revoked | Draining | StoreChanged | Complained


class ClientSession:
    """The worker's side of the protocol. `receive` reads a frame and returns events; `outgoing` yields frames to send.

    ``capacity`` is the maximum number of deliveries that the worker has at once, running or waiting to run.
    """

    def __init__(
        self, worker_id: str, keys: Iterable[str], capacity: int, token: str | None = None
    ) -> None:
        self._worker_id = worker_id
        self._keys = list(keys)
        self._token = token
        self._capacity = capacity
        self._lent = 0
        self._state = ClientSessionState.CONNECTING
        self._greeted = False
        self._leaving = False
        self._busy = 0
        self._granted = 0
        self._held: dict[str, None] = {}
        self._outbox: dict[str, Outcome] = {}
        self._unsent: list[str] = []
        self._progress: dict[str, float | str] = {}
        self._events = OutgoingEvents()
        self._echoes: list[int] = []
        self._pings = 0
        self._ping_due = False
        self.limits = frames.WireLimits()
        self.features: frozenset[frames.Feature] = frozenset()
        """what the server can do, by its last welcome"""
        self.lease: float | None = None

    @property
    def state(self) -> ClientSessionState:
        """The current state of the session."""
        return self._state

    @property
    def pause(self) -> float | None:
        """Seconds after which `outgoing` yields events that wait now; ``None`` if none wait, or for a frame."""
        pause = self._events.pause if self._events.unsent else 0.0
        return pause if 0 < pause < math.inf else None

    @property
    def held(self) -> int:
        """The number of deliveries for which the worker has not reported an outcome."""
        return len(self._held)

    @property
    def unconfirmed(self) -> int:
        """The number of outcomes that the server has not confirmed."""
        return len(self._outbox)

    @property
    def granted(self) -> int:
        """The number of deliveries that the server may still send on this connection."""
        return self._granted

    def connected(self) -> None:
        """Record that a socket is open. The next frame is a hello with the receipts of all unsettled deliveries."""
        self._require(ClientSessionState.CONNECTING)
        self._state = ClientSessionState.GREETING

    def disconnected(self) -> None:
        """Record that the socket has closed. Receipts are kept until the next welcome shows which of them are lost."""
        if self._state is ClientSessionState.CLOSED:
            return
        self._state = ClientSessionState.CONNECTING
        self._greeted = False
        self._granted = 0
        self._echoes.clear()
        self._progress.clear()
        self._ping_due = False

    def receive(self, text: str | bytes) -> list[Event]:
        """Read a frame, and return its events. Raises `ProtocolViolation`; if it is ``fatal``, close the connection."""
        self._require(*_CONNECTED)
        frame = frames.decode_server(text)
        if isinstance(frame, frames.StoredFrame):
            self._events.confirm(frame.numbers)
            return []
        events: list[Event] = []
        match frame:
            case frames.Ping():
                self._echoes.append(frame.n)
            case frames.Welcome():
                events = self._welcome(frame)
            case frames.Deliver():
                events = self._deliver(frame.deliveries)
            case frames.SettledFrame():
                events = self._settled(frame)
            case frames.Revoke():
                events = self._revoked(frame.receipts)
            case frames.Drain():
                self._require(*_OPEN)
                self._state = ClientSessionState.DRAINING
                events = [Draining(frame.seconds)]
            case frames.Degraded():
                events = [StoreChanged(frame.ok, frame.reason)]
            case frames.Error():
                events = [Complained(frame.code[:50], frame.message[:200])]
        return events

    def _welcome(self, frame: frames.Welcome) -> list[Event]:
        self._require(ClientSessionState.GREETING)
        if not self._greeted:
            raise ProtocolViolation("unexpected", "received a welcome before a hello was sent")
        if not 0 < frame.lease < float("inf"):
            raise ProtocolViolation(
                "invalid_frame", "the lease must be a positive number of seconds"
            )
        self._state = ClientSessionState.READY
        self.lease = frame.lease
        self.limits = frame.limits
        self.features = frames.known_features(frame.features)
        adopted = set(frame.adopted)
        lost = [receipt for receipt in (*self._held, *self._outbox) if receipt not in adopted]
        events: list[Event] = [
            Welcomed(
                frame.connection_id, len(self._held) + len(self._outbox) - len(lost), len(lost)
            )
        ]
        events += self._revoked(lost)
        self._unsent = list(self._outbox)
        if frames.Feature.EVENTS in self.features:
            self._events.rewind()
        else:
            self._events.clear()
        return events

    def _deliver(self, deliveries: Sequence[frames.WireDelivery]) -> list[Event]:
        self._require(*_OPEN)
        self._granted = max(0, self._granted - len(deliveries))
        room, taken = self._most - self._busy, list[frames.WireDelivery]()
        for delivery in deliveries:
            receipt = delivery.receipt
            if receipt in self._held or receipt in self._outbox:
                continue
            if len(taken) >= room:
                self._put(receipt, HandBack())
                continue
            self._held[receipt] = None
            taken.append(delivery)
        self._busy += len(taken)
        return [Delivered(taken)] if taken else []

    def _settled(self, frame: frames.SettledFrame) -> list[Event]:
        self._require(*_OPEN)
        for receipt in frame.ok:
            self._outbox.pop(receipt, None)
        if self._events:
            self._events.forget(*frame.ok)
        return self._revoked(frame.lease_lost)

    def _revoked(self, receipts: Iterable[str]) -> list[Event]:
        running = []
        for receipt in receipts:
            self._outbox.pop(receipt, None)
            self._events.forget(receipt)
            if receipt in self._held:
                self._drop(receipt)
                running.append(receipt)
        return [Revoked(running)] if running else []

    def resize(self, capacity: int) -> None:
        """Set the maximum number of deliveries that the worker has at once. New deliveries above it are released."""
        self._capacity = capacity

    def lend(self, count: int) -> None:
        """Set the number of deliveries that the worker has beyond its capacity, because their handlers wait."""
        self._lent = count

    def settle(self, receipt: str, outcome: Outcome) -> bool:
        """Queue an outcome, and keep it until the server confirms it. Return False if the delivery is not held."""
        if receipt not in self._held:
            return False
        del self._held[receipt]
        if self._progress:
            self._progress.pop(receipt, None)
        self._outbox[receipt] = outcome
        self._unsent.append(receipt)
        return True

    def free(self) -> None:
        """Free the capacity of one delivery, because its handler has ended."""
        self._busy = max(0, self._busy - 1)

    def finish(self, receipt: str, outcome: Outcome) -> None:
        """Settle a receipt, and free its capacity."""
        self.settle(receipt, outcome)
        self.free()

    def progress(self, receipt: str, value: float | str) -> None:
        """Queue the progress of a running delivery. Only the latest value is sent, and it may be lost."""
        if receipt in self._held:
            self._progress[receipt] = value

    def stream(self, receipt: str, value: bytes, channel: str) -> None:
        """Keep an event of a running delivery until the server confirms it; drop it if the server takes none.

        `outgoing` yields new events together, once the server has confirmed those that were sent before the last ones,
        or after `pause`. An outcome is preceded by all events in any case.
        """
        if receipt in self._held and frames.Feature.EVENTS in self.features:
            self._events.add(receipt, value, channel)

    def drained(self, receipt: str, callback: Callable[[], None]) -> None:
        """Call a function when the server has stored all events of a delivery, or they are dropped."""
        self._events.after(receipt, callback)

    def ping(self) -> None:
        """Queue a ping, which `outgoing` yields with the next frames."""
        self._ping_due = True

    def bye(self) -> None:
        """Queue a bye, which `outgoing` yields as the last frame, closing the session."""
        self._leaving = True

    def outgoing(self) -> Iterator[str]:
        """Yield the frames to send now. Each frame is yielded once."""
        if self._state is ClientSessionState.GREETING and not self._greeted:
            self._greeted = True
            yield frames.encode(self._hello())
        if self._state in _CONNECTED:
            echoes, self._echoes = self._echoes, []
            for n in echoes:
                yield frames.encode(frames.Pong(n=n))
        if self._state in _OPEN:
            for frame in self._reports():
                yield frames.encode(frame)
            if self._leaving:
                self._state = ClientSessionState.CLOSED
                yield frames.encode(frames.Bye())

    def _reports(self) -> Iterator[frames.ClientFrame]:
        progress, self._progress = self._progress, {}
        for receipt, value in progress.items():
            yield frames.Progress(receipt=receipt, value=value)
        if self._events.unsent and (self._unsent or not self._events.pause):
            yield from self._events.frames()
        unsent, self._unsent = self._unsent, []
        outbox = self._outbox
        outcomes = [(receipt, outbox[receipt]) for receipt in unsent if receipt in outbox]
        yield from frames_of(outcomes, self.limits, self.features)
        if self._state is ClientSessionState.READY and (n := self._wanted()):
            self._granted += n
            yield frames.Credit(n=n)
        if self._ping_due:
            self._ping_due = False
            self._pings += 1
            yield frames.Ping(n=self._pings)

    def _hello(self) -> frames.Hello:
        # The credit in a hello does not include the deliveries that are listed in `holding`.
        self._granted = self._wanted()
        return frames.Hello(
            worker_id=self._worker_id,
            keys=self._keys,
            credit=self._granted,
            token=self._token,
            holding=[*self._held, *self._outbox],
            features=list(frames.FEATURES),
        )

    def _wanted(self) -> int:
        # The next hello must fit into a frame, so its `holding` may list at most `LIMITS.credit` receipts.
        books = self._granted + len(self._held) + len(self._outbox)
        return max(0, min(self._most - self._busy - self._granted, LIMITS.credit - books))

    @property
    def _most(self) -> int:
        return self._capacity and self._capacity + self._lent

    def _put(self, receipt: str, outcome: Outcome) -> None:
        self._outbox[receipt] = outcome
        self._unsent.append(receipt)

    def _drop(self, receipt: str) -> None:
        del self._held[receipt]
        self._progress.pop(receipt, None)

    def _require(self, *states: ClientSessionState) -> None:
        if self._state not in states:
            raise ProtocolViolation(
                "unexpected", f"this frame or call is not possible in the state {self._state.value}"
            )
