"""The frames of the socket protocol, version 1, and their encoding. `docs/protocol.md` describes the protocol.

A frame is one JSON object in a text message; its field ``type`` is the name of the frame. Unknown fields are ignored,
so that either side may be newer. Payloads and results are copied as raw JSON: no code between publisher and worker
decodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, field

from taskqueue_core.after import After, TaskRef
from taskqueue_core.errors import InvalidInput, ProtocolViolation
from taskqueue_core.limits import LIMITS, check_json
from taskqueue_core.tasks import DEFAULT_PRIORITY, Delivery, Task
from taskqueue_core.uniqueness import UniqueKey

SUBPROTOCOL = "taskqueue.v1"
PROTOCOL_VERSION = 1

CLOSE_CLEAN = 1000
CLOSE_RESTART = 1012
"""close code: the server is shutting down; reconnect to any replica"""
CLOSE_TRY_LATER = 1013
"""close code: there are too many connections, or the store is unavailable; reconnect after a pause"""
CLOSE_REVOKED = 4001
"""close code: the worker's token is no longer valid, or no longer allows its keys"""
CLOSE_PROTOCOL = 4400
CLOSE_UNAUTHENTICATED = 4401
CLOSE_TIMEOUT = 4408
"""close code: the worker did not send its hello in time, or sent no frame for longer than the lease"""


class Feature(StrEnum):
    """An ability that a peer of version 1 may lack. Each side names those it has in its first frame."""

    SNOOZE = "snooze"
    """the server schedules a retry that counts no attempt (``retry.free``)"""
    TRACEBACKS = "tracebacks"
    """the server stores the traceback of a failure (``traceback`` of `RetryFrame` and `DeadLetterFrame`)"""
    TIMEOUTS = "timeouts"
    """the worker ends an attempt that runs longer than ``deliver.timeout``"""
    INPUTS = "inputs"
    """the worker gives a handler the results of other tasks (``deliver.inputs``)"""
    EVENTS = "events"
    """the server stores the events that tasks stream (`EventFrame`), and confirms them (`StoredFrame`)"""
    CODECS = "codecs"
    """the worker decodes a payload that a codec has encoded, or puts the task off"""


FEATURES: tuple[Feature, ...] = tuple(Feature)
"""the features that this version has, as a worker and as a server"""

_Name = Annotated[str, Meta(max_length=LIMITS.name)]
_Text = Annotated[str, Meta(max_length=LIMITS.text)]
_Traceback = Annotated[str, Meta(max_length=LIMITS.traceback)] | None
_Receipt = Annotated[str, Meta(min_length=1, max_length=LIMITS.name)]
_Receipts = Annotated[list[_Receipt], Meta(max_length=LIMITS.batch)]
_Keys = Annotated[list[_Name], Meta(min_length=1, max_length=LIMITS.keys)]
_Count = Annotated[int, Meta(ge=0, le=LIMITS.credit)]
_Features = Annotated[list[_Name], Meta(max_length=LIMITS.features)]


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """A message of the protocol."""


# Frames that the worker sends:


class Hello(_Frame, tag="hello", frozen=True, kw_only=True):
    """The first frame of a worker."""

    worker_id: _Name
    keys: _Keys
    credit: _Count = 0
    token: Annotated[str, Meta(max_length=1024)] | None = None
    holding: Annotated[list[_Receipt], Meta(max_length=LIMITS.credit)] = []
    """after a reconnect: receipts whose tasks the worker still runs, or whose outcomes the server has not confirmed"""
    protocol: int = PROTOCOL_VERSION
    features: _Features = []
    """the names of the worker's features; unknown names are ignored"""


class Credit(_Frame, tag="credit", frozen=True, kw_only=True):
    """Permission for the server to send ``n`` more deliveries."""

    n: Annotated[int, Meta(ge=1, le=LIMITS.credit)]


class AckFrame(_Frame, tag="ack", frozen=True, kw_only=True):
    """The tasks were executed. Each receipt may have a result."""

    receipts: _Receipts
    results: dict[str, Raw] = {}


class RedeliverFrame(_Frame, tag="redeliver", frozen=True, kw_only=True):
    """The tasks were not executed; they are released and available again at once."""

    receipts: _Receipts


class RetryFrame(_Frame, tag="retry", frozen=True, kw_only=True):
    """The attempt failed. The server applies the queue's retry policy; ``delay`` overrides the delay of the policy.

    With ``free``, the attempt neither failed nor counts: the task runs again after ``delay``, and ``error`` is ignored.
    """

    receipt: _Receipt
    error: _Text = ""
    delay: Annotated[float, Meta(ge=0, le=365 * 86_400)] | None = None
    free: bool = False
    traceback: _Traceback = None


class DeadLetterFrame(_Frame, tag="dead_letter", frozen=True, kw_only=True):
    """The task must not be tried again, and becomes a dead letter."""

    receipt: _Receipt
    reason: _Text
    error: _Text | None = None
    traceback: _Traceback = None


class Progress(_Frame, tag="progress", frozen=True, kw_only=True):
    """The progress of a task: a number from 0 to 1, or a short text."""

    receipt: _Receipt
    value: Annotated[float, Meta(ge=0, le=1)] | _Text


class WireEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event that a task streams."""

    value: Raw
    channel: Annotated[str, Meta(max_length=LIMITS.channel)] = "data"


class WireEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive events of one delivery."""

    receipt: _Receipt
    first: Annotated[int, Meta(ge=1, le=10**14)]
    """number of the first of them among all events of the delivery, which are numbered from 1"""
    events: Annotated[list[WireEvent], Meta(min_length=1, max_length=LIMITS.batch)]


class EventFrame(_Frame, tag="event", frozen=True, kw_only=True):
    """Events of running tasks. It settles nothing. Events that were sent before are not stored again."""

    streams: Annotated[list[WireEvents], Meta(max_length=LIMITS.batch)]


class Bye(_Frame, tag="bye", frozen=True, kw_only=True):
    """The worker is leaving; the server releases all deliveries that the worker has not settled."""


# Frames that either side sends:


class Ping(_Frame, tag="ping", frozen=True, kw_only=True):
    """A request for a pong."""

    n: int = 0


class Pong(_Frame, tag="pong", frozen=True, kw_only=True):
    """The answer to a ping, with its ``n``."""

    n: int = 0


# Frames that the server sends:


class WireLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the server: ``frame``, ``payload`` and ``result`` are sizes in bytes."""

    frame: int = LIMITS.frame
    payload: int = LIMITS.payload
    result: int = LIMITS.result
    credit: int = LIMITS.credit
    batch: int = LIMITS.batch


class Welcome(_Frame, tag="welcome", frozen=True, kw_only=True):
    """The answer to a hello. Receipts in the hello that are not in ``adopted`` are lost: a `Revoke` frame follows."""

    connection_id: str
    lease: float
    """seconds without a frame after which either side closes the connection; send at least three pings in this time"""
    server: str
    limits: WireLimits = WireLimits()
    adopted: list[str] = []
    features: _Features = []
    """the names of the server's features; unknown names are ignored"""


class WireTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON form of a task."""

    id: str
    key: str
    payload: Raw = field(default_factory=lambda: Raw(b"null"))
    headers: dict[str, str] = {}
    priority: int = DEFAULT_PRIORITY
    tenant: str | None = None
    ordering_key: str | None = None
    deadline: float | None = None
    not_before: float | None = None
    max_attempts: int | None = None
    tags: tuple[str, ...] = ()
    unique: UniqueKey | None = None
    content_digest: bytes | None = None
    """in base64"""
    after: After | None = None
    batch: TaskRef | None = None


class WireDelivery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON form of a delivery."""

    receipt: str
    attempt: int
    losses: int = 0
    prior: int = 0
    delivered_at: float
    shard: int | None = None
    shard_changed: bool = False
    timeout: float | None = None
    inputs: tuple[Raw, ...] = ()
    """as in `Delivery`, with null for a parent that has no result"""
    task: WireTask


class Deliver(_Frame, tag="deliver", frozen=True, kw_only=True):
    """Deliveries for the worker. Each of them uses up one unit of credit."""

    deliveries: list[WireDelivery]


class SettledFrame(_Frame, tag="settled", frozen=True, kw_only=True):
    """The results of settlements."""

    ok: list[str] = []
    lease_lost: list[str] = []
    """receipts that are stale or unknown; nothing was changed"""


class StoredFrame(_Frame, tag="stored", frozen=True, kw_only=True):
    """For receipts, the number up to which their events are stored. The worker may forget these events."""

    numbers: dict[str, int]


class Revoke(_Frame, tag="revoke", frozen=True, kw_only=True):
    """These deliveries no longer belong to the worker. Stop their handlers, and do not settle the deliveries."""

    receipts: list[str]


class Drain(_Frame, tag="drain", frozen=True, kw_only=True):
    """The server is shutting down and sends no deliveries. Settle what you can within ``seconds``, then reconnect."""

    seconds: float


class Degraded(_Frame, tag="degraded", frozen=True, kw_only=True):
    """The store is unavailable or, if ``ok`` is set, available again. Running tasks continue, and credit is kept."""

    ok: bool = False
    reason: str = ""


class Error(_Frame, tag="error", frozen=True, kw_only=True):
    """The server refused a frame or the connection. If the error is fatal, the server closes the connection."""

    code: str
    message: str


def known_features(names: Iterable[str]) -> frozenset[Feature]:
    """Return the features among the names that a peer sent. A newer peer may name others."""
    return frozenset(feature for feature in Feature if feature in names)


SettlementFrame = AckFrame | RedeliverFrame | RetryFrame | DeadLetterFrame
ClientFrame = Hello | Credit | SettlementFrame | Progress | EventFrame | Ping | Pong | Bye
ServerFrame = (
    Welcome | Deliver | SettledFrame | StoredFrame | Revoke | Drain | Degraded | Error | Ping | Pong
)

_encoder = msgspec.json.Encoder()
_NULL = Raw(b"null")


def encode(frame: ClientFrame | ServerFrame) -> str:
    """Return the text of a frame."""
    return _encoder.encode(frame).decode()


def _decode(decoder: msgspec.json.Decoder[Any], text: str | bytes) -> Any:
    if len(text) > LIMITS.frame:
        raise ProtocolViolation("too_large", f"a frame may have at most {LIMITS.frame} bytes")
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        message = str(error)
        if message.endswith("`$.type`") and message.startswith("Invalid value"):
            raise ProtocolViolation("unknown_type", "unknown frame type", fatal=False) from None
        raise ProtocolViolation("invalid_frame", _without_values(message)) from None
    except (ValueError, RecursionError):
        raise ProtocolViolation("not_json", "a frame must be one JSON object in UTF-8") from None


decode_client: Callable[[str | bytes], ClientFrame] = partial(
    _decode, msgspec.json.Decoder(ClientFrame)
)
"""Decode a worker's frame, or raise `ProtocolViolation`. An unknown frame is not fatal: the worker may be newer."""
decode_server: Callable[[str | bytes], ServerFrame] = partial(
    _decode, msgspec.json.Decoder(ServerFrame)
)
"""Decode a server's frame, or raise `ProtocolViolation`. An unknown frame is not fatal: the server may be newer."""


def _without_values(message: str) -> str:
    # msgspec's messages name the field and the types, but those with "Invalid value" may quote a confidential value.
    return "a field has an invalid value" if "Invalid value" in message else message


def to_wire_task(task: Task) -> WireTask:
    """Convert a task for a frame. The bytes of the payload are shared, not copied."""
    return WireTask(
        id=task.id,
        key=task.key,
        payload=Raw(task.payload),
        headers=task.headers,
        priority=task.priority,
        tenant=task.tenant,
        ordering_key=task.ordering_key,
        deadline=task.deadline,
        not_before=task.not_before,
        max_attempts=task.max_attempts,
        tags=task.tags,
        unique=task.unique,
        content_digest=task.content_digest,
        after=task.after,
        batch=task.batch,
    )


def to_wire(delivery: Delivery) -> WireDelivery:
    """Convert a delivery for a frame."""
    return WireDelivery(
        receipt=delivery.receipt,
        attempt=delivery.attempt,
        losses=delivery.losses,
        prior=delivery.prior,
        delivered_at=delivery.delivered_at,
        shard=delivery.shard,
        shard_changed=delivery.shard_changed,
        timeout=delivery.timeout,
        inputs=tuple([_NULL if each is None else Raw(each) for each in delivery.inputs])
        if delivery.inputs
        else (),
        task=to_wire_task(delivery.task),
    )


def to_task(wire: WireTask) -> Task:
    """Convert the task in a frame to a `Task`, whose constructor checks it and may raise `InvalidInput`."""
    return Task(**msgspec.structs.asdict(wire) | {"payload": bytes(wire.payload)})


def result_text(raw: Raw) -> bytes:
    """Return the JSON text of a result. Raises `ProtocolViolation` if it is too long or invalid."""
    text = bytes(raw)
    try:
        check_json("results", text, "result")
    except InvalidInput as error:
        raise ProtocolViolation("invalid_frame", str(error)) from None
    return text
