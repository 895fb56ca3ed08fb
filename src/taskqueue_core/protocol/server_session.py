"""The server's side of the socket protocol, without I/O: it reads frames as text and tracks one connection.

::

    new ── hello, welcome ──> ready ── drain ──> draining
     │                          │                   │
     └──────────── bye, hangup, violation ──────────┴──> closed

`feed` reads a worker's frame and returns events; it never raises, whatever the input. The methods that send frames
return the texts to send now, and raise `ProtocolViolation` if the call would make the server itself break the protocol.
A closed session sends nothing. A receipt is *held* from its delivery until the worker settles it, or it is revoked or
moved. While its settlement is in progress, it is *pending*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from taskqueue_core.errors import InvalidInput, ProtocolViolation
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.protocol import frames
from taskqueue_core.protocol.deliver_frames import deliver_frames
from taskqueue_core.protocol.settlements import outcomes_of
from taskqueue_core.retry import Outcome
from taskqueue_core.tasks import Delivery


class ServerSessionState(StrEnum):
    """The states of a `ServerSession`."""

    NEW = "new"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


class Greeted(msgspec.Struct, frozen=True):
    """The worker has sent its hello; answer with a welcome or a refusal."""

    hello: frames.Hello


class CreditGranted(msgspec.Struct, frozen=True):
    """The worker can take ``n`` more deliveries."""

    n: int


class SettlementRequested(msgspec.Struct, frozen=True):
    """The worker reported outcomes, which must be settled according to the retry policies of the queues."""

    outcomes: list[tuple[Delivery, Outcome]]


class Progressed(msgspec.Struct, frozen=True):
    """The worker reported the progress of a running task."""

    delivery: Delivery
    value: float | str


class Streamed(msgspec.Struct, frozen=True):
    """The worker sent events of a running task, numbered from ``first``."""

    delivery: Delivery
    events: Sequence[frames.WireEvent]
    first: int


class WorkerLeft(msgspec.Struct, frozen=True):
    """The worker said bye; the session is closed."""


class SendFrames(msgspec.Struct, frozen=True):
    """The text of a frame that the server must send."""

    text: str


class CloseSocket(msgspec.Struct, frozen=True):
    """The session is closed: close the socket with ``code``."""

    code: int
    reason: str


_Reported = CreditGranted | SettlementRequested | Progressed | Streamed
Event = Greeted | _Reported | WorkerLeft | SendFrames | CloseSocket

_DELIVERY_BYTES = 2 * LIMITS.payload + LIMITS.header_bytes
"""maximum size of a delivery: a payload, headers, and inputs, which have the limit of a payload together"""
_PIECE = 500
"""maximum number of receipts in one frame, so that even long receipts do not exceed the size limit of a frame"""
_REASON_BYTES = 123
_OPEN = (ServerSessionState.READY, ServerSessionState.DRAINING)


class ServerSession:
    """The server's side of one connection. The worker's first frame must be a hello. Not thread-safe."""

    def __init__(self) -> None:
        self._state = ServerSessionState.NEW
        self._hello: frames.Hello | None = None
        self._credit = 0
        self._held: dict[str, Delivery] = {}
        self._pending: dict[str, Delivery] = {}
        self._pings = 0
        self._sizes: dict[str, int] = {}
        """bytes of the deliveries, held and pending, by receipt"""
        self._held_bytes = 0
        self.unknown = 0
        """number of receipts that the worker named but does not hold, less one per delivery sent, as leases may end"""

    @property
    def state(self) -> ServerSessionState:
        """The current state of the session."""
        return self._state

    @property
    def worker_id(self) -> str | None:
        """The worker's id, once it has sent a hello."""
        return None if self._hello is None else self._hello.worker_id

    @property
    def features(self) -> frozenset[frames.Feature]:
        """What the worker can do, by its hello."""
        return frames.known_features(() if self._hello is None else self._hello.features)

    @property
    def credit(self) -> int:
        """The number of deliveries that may still be sent; 0 unless the session is ready."""
        return self._credit if self._state is ServerSessionState.READY else 0

    @property
    def room(self) -> int:
        """The number of deliveries of any size that may be sent now, within the credit and `Limits.held`."""
        return min(self.credit, max(0, LIMITS.held - self._held_bytes) // _DELIVERY_BYTES)

    @property
    def held(self) -> tuple[Delivery, ...]:
        """The deliveries that the worker has not tried to settle, oldest first."""
        return tuple(self._held.values())

    @property
    def busy(self) -> int:
        """The number of deliveries that the worker has, including those whose settlement is in progress."""
        return len(self._held) + len(self._pending)

    def feed(self, data: str | bytes) -> list[Event]:
        """Read a worker's message, and return the resulting events. Never raises. A closed session ignores messages."""
        if self._state is ServerSessionState.CLOSED:
            return []
        try:
            return self._handle(_read(data))
        except ProtocolViolation as error:
            if error.fatal:
                return self.refuse(error.rule, str(error))
            return [SendFrames(frames.encode(frames.Error(code=error.rule, message=str(error))))]

    def refuse(self, rule: str, message: str, code: int = frames.CLOSE_PROTOCOL) -> list[Event]:
        """Close the session; return the events that send an error frame and close the socket."""
        if self._state is ServerSessionState.CLOSED:
            return []
        self._state = ServerSessionState.CLOSED
        reason = rule.encode()[:_REASON_BYTES].decode("ascii", "ignore")
        return [
            SendFrames(frames.encode(frames.Error(code=rule, message=message))),
            CloseSocket(code, reason),
        ]

    def _handle(self, frame: frames.ClientFrame) -> list[Event]:
        if isinstance(frame, frames.Hello):
            return self._greet(frame)
        self._require(*_OPEN)
        if isinstance(frame, frames.SettlementFrame):
            return self._settle(frame)
        events: list[Event] = []
        match frame:
            case frames.Ping():
                events.append(SendFrames(frames.encode(frames.Pong(n=frame.n))))
            case frames.Credit():
                events += self._grant(frame.n)
            case frames.Progress():
                events += self._progress(frame)
            case frames.EventFrame():
                events += self._stream(frame)
            case frames.Bye():
                self._state = ServerSessionState.CLOSED
                events.append(WorkerLeft())
            case frames.Pong():
                pass
        return events

    def _settle(self, frame: frames.SettlementFrame) -> list[Event]:
        # Only the first settlement of a receipt counts. Others are ignored while it is pending, and stale afterwards.
        known: list[tuple[Delivery, Outcome]] = []
        stale: list[str] = []
        for receipt, outcome in outcomes_of(frame).items():
            delivery = self._held.pop(receipt, None)
            if delivery is not None:
                self._pending[receipt] = delivery
                known.append((delivery, outcome))
            elif receipt not in self._pending:
                stale.append(receipt)
        self.unknown += len(stale)
        lost = (frames.SettledFrame(lease_lost=piece) for piece in _pieces(stale))
        events: list[Event] = [SendFrames(frames.encode(frame)) for frame in lost]
        if known:
            events.insert(0, SettlementRequested(known))
        return events

    def _greet(self, hello: frames.Hello) -> list[Event]:
        if self._hello is not None:
            raise ProtocolViolation("unexpected", "a hello was already sent")
        if hello.protocol != frames.PROTOCOL_VERSION:
            raise ProtocolViolation(
                "unsupported_protocol", f"this server supports protocol {frames.PROTOCOL_VERSION}"
            )
        try:
            check_name("worker_id", hello.worker_id)
            for key in hello.keys:
                check_name("keys", key)
        except InvalidInput as error:
            raise ProtocolViolation("invalid_frame", str(error)) from None
        self._hello = hello
        self._check_total(hello.credit + len(hello.holding))
        return [Greeted(hello)]

    def _grant(self, n: int) -> list[Event]:
        self._check_total(self._credit + self.busy + n)
        self._credit += n
        return [CreditGranted(n)]

    def _check_total(self, total: int) -> None:
        if total > LIMITS.credit:
            raise ProtocolViolation(
                "too_much_credit", f"credit plus held deliveries may be at most {LIMITS.credit}"
            )

    def _progress(self, frame: frames.Progress) -> list[Event]:
        delivery = self._held.get(frame.receipt)
        if delivery is not None:
            return [Progressed(delivery, frame.value)]
        if frame.receipt in self._pending:
            return []
        self.unknown += 1
        return [SendFrames(frames.encode(frames.SettledFrame(lease_lost=[frame.receipt])))]

    def _stream(self, frame: frames.EventFrame) -> Iterator[Event]:
        stale: list[str] = []
        for each in frame.streams:
            delivery = self._held.get(each.receipt)
            if delivery is not None:
                yield Streamed(delivery, each.events, each.first)
            elif each.receipt not in self._pending:
                stale.append(each.receipt)
        self.unknown += len(stale)
        for piece in _pieces(stale):
            yield SendFrames(frames.encode(frames.SettledFrame(lease_lost=piece)))

    def stored(self, numbers: dict[str, int]) -> list[str]:
        """Return a frame that confirms events, by receipt up to a number."""
        return self._send(frames.StoredFrame(numbers=numbers))

    def welcome(
        self,
        connection_id: str,
        lease: float,
        server: str,
        adopted: Sequence[Delivery] = (),
        features: Sequence[frames.Feature] = frames.FEATURES,
    ) -> list[str]:
        """Return a welcome frame, and frames that revoke all receipts of the hello except those in ``adopted``."""
        hello = self._hello
        if self._state is ServerSessionState.CLOSED:
            return []
        self._require(ServerSessionState.NEW)
        if hello is None:
            raise ProtocolViolation("unexpected", "a welcome must follow a hello")
        self._state = ServerSessionState.READY
        self._credit = hello.credit
        self._hold(adopted)
        retained = list(self._held)
        gone = [receipt for receipt in dict.fromkeys(hello.holding) if receipt not in self._held]
        self.unknown = len(gone)
        welcome = frames.Welcome(
            connection_id=connection_id,
            lease=lease,
            server=server,
            limits=frames.WireLimits(),  # a new object, because the encoder would omit the default object
            adopted=retained,
            features=list(features),
        )
        return [
            frames.encode(welcome),
            *(frames.encode(frames.Revoke(receipts=piece)) for piece in _pieces(gone)),
        ]

    def deliver(self, deliveries: Sequence[Delivery]) -> Iterator[tuple[str, Sequence[Delivery]]]:
        """Record deliveries as sent, which uses up credit. Yield each frame with the deliveries that it contains.

        Frames are built one at a time, so that only one frame is in memory even if the worker reads slowly.
        """
        self._require(ServerSessionState.READY)
        if len(deliveries) > self._credit:
            raise ProtocolViolation("unexpected", "there are more deliveries than credit")
        self._credit -= len(deliveries)
        self.unknown = max(0, self.unknown - len(deliveries))
        return deliver_frames(deliveries, self._hold(deliveries))

    def _hold(self, deliveries: Sequence[Delivery]) -> int:
        sizes = {delivery.receipt: delivery.size for delivery in deliveries}
        self._held.update(zip(sizes, deliveries, strict=True))
        self._sizes |= sizes
        size = sum(sizes.values())
        self._held_bytes += size
        return size

    def _drop(self, deliveries: dict[str, Delivery], receipt: str) -> bool:
        if deliveries.pop(receipt, None) is None:
            return False
        self._held_bytes -= self._sizes.pop(receipt)
        return True

    def settled(self, outcomes: Mapping[str, bool]) -> list[str]:
        """End pending settlements; return frames that report, for each receipt, whether its settlement took effect."""
        for receipt in outcomes:
            self._drop(self._pending, receipt)
        if self._state is ServerSessionState.CLOSED:
            return []
        return [
            frames.encode(
                frames.SettledFrame(
                    ok=[receipt for receipt in piece if outcomes[receipt]],
                    lease_lost=[receipt for receipt in piece if not outcomes[receipt]],
                )
            )
            for piece in _pieces(list(outcomes))
        ]

    def revoke(self, receipts: Iterable[str]) -> list[str]:
        """Return frames that revoke receipts of the worker, except those whose settlement is in progress."""
        gone = [receipt for receipt in receipts if self._drop(self._held, receipt)]
        return self._send(*(frames.Revoke(receipts=piece) for piece in _pieces(gone)))

    def forget(self, receipts: Iterable[str]) -> None:
        """Remove receipts without a frame, because their deliveries moved to another connection or were never sent."""
        for receipt in receipts:
            self._drop(self._held, receipt)

    def drain(self, seconds: float) -> list[str]:
        """Stop deliveries, and return a drain frame. Settlements are still accepted. Idempotent."""
        if self._state is not ServerSessionState.READY:
            return []
        self._state = ServerSessionState.DRAINING
        return [frames.encode(frames.Drain(seconds=seconds))]

    def degraded(self, *, ok: bool, reason: str = "") -> list[str]:
        """Return a frame that reports that the store is unavailable or, if ``ok`` is set, available again."""
        return self._send(frames.Degraded(ok=ok, reason=reason))

    def ping(self) -> list[str]:
        """Return a ping frame, which asks the worker for a pong."""
        self._pings += 1
        return self._send(frames.Ping(n=self._pings))

    def close(self) -> None:
        """Close the session, which then neither sends nor reads frames. `held` is unchanged."""
        self._state = ServerSessionState.CLOSED

    def _send(self, *to_send: frames.ServerFrame) -> list[str]:
        if self._state is ServerSessionState.CLOSED:
            return []
        self._require(*_OPEN)
        return [frames.encode(frame) for frame in to_send]

    def _require(self, *states: ServerSessionState) -> None:
        if self._state not in states:
            why = f"this frame or call is not possible in the state {self._state.value}"
            early = self._state is ServerSessionState.NEW and self._hello is None
            raise ProtocolViolation("unexpected", "the first frame must be hello" if early else why)


def _read(data: str | bytes) -> frames.ClientFrame:
    if isinstance(data, bytes):
        raise ProtocolViolation("not_text", "frames must be text messages")
    return frames.decode_client(data)


def _pieces(receipts: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(receipts), _PIECE):
        yield list(receipts[start : start + _PIECE])
