"""Messages between a worker and its child processes: MessagePack structs over a private socket, each after its length.

Payloads and results are JSON text in them. Functions are named only by the worker, from its registry.
"""

from __future__ import annotations

import struct
from typing import Any, get_args

import msgspec

from taskqueue_core.retry import Outcome

LENGTH = struct.Struct(">I")
"""the length of a message, before it"""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message to a child: what to import."""

    path: list[str]
    """``sys.path`` of the worker"""
    modules: list[str]
    """modules whose import declares the tasks"""
    registries: list[tuple[str, str]]
    """module and attribute of each registry"""
    names: list[str]
    """names of the tasks"""
    worker_id: str
    connection: dict[str, str | None] | None
    """the worker's connection, if a child can open such a one: its backend, and the options of a server"""
    hide_texts: bool
    """whether the log omits the texts of errors"""
    level: int
    """lowest level of the log records that the worker handles"""
    structlog: bool
    """whether structlog has the configuration of the worker"""


class RunTask(msgspec.Struct, frozen=True, tag="run"):
    """An order to run one task."""

    delivery: bytes
    """JSON text of a `taskqueue_core.protocol.frames.WireDelivery`"""
    result_limit: int


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """The answer to the oldest `DrainAsked` that has none."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A report that the child can run tasks."""


class NotStarted(msgspec.Struct, frozen=True, tag="not_started"):
    """A report that the child cannot run tasks."""

    reason: str
    configuration: bool
    """whether the program is wrong, so that another start would not help"""


class ProgressMade(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of the running task."""

    value: float | str


class Streamed(msgspec.Struct, frozen=True, tag="streamed"):
    """An event of the running task."""

    value: bytes
    channel: str


class DrainAsked(msgspec.Struct, frozen=True, tag="drain"):
    """A request to say when all events so far are stored."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The outcome of the running task."""

    kind: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, outcome: Outcome) -> Ended:
        """Return the message for an outcome."""
        return cls(type(outcome).__name__, msgspec.structs.asdict(outcome))

    def outcome(self) -> Outcome:
        """Return the outcome."""
        outcome: Outcome = msgspec.convert(self.fields, _OUTCOMES[self.kind])
        return outcome


class Record(msgspec.Struct, frozen=True, tag="record"):
    """A log record of the child."""

    name: str
    level: int
    message: str
    fields: dict[str, Any]
    """further attributes of the record"""
    exception: str | None
    """the formatted traceback"""


Order = Begin | RunTask | Drained
Report = Ready | NotStarted | ProgressMade | Streamed | DrainAsked | Ended | Record
ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_OUTCOMES: dict[str, type[Outcome]] = {kind.__name__: kind for kind in get_args(Outcome)}


def packed(message: Order | Report) -> bytes:
    """Return a message with its length.

    Values of log records that MessagePack cannot express become text; lone surrogates in texts are replaced.
    """
    try:
        body = _encode(message)
        if isinstance(message, Record):
            REPORTS.decode(body)  # a `msgspec.Raw` among the values is seldom MessagePack
    except Exception:  # noqa: BLE001 - such as a number of more than 64 bits, or a list that contains itself
        fields = msgspec.structs.asdict(message)
        values = {name: _expressible(value, 2) for name, value in fields.items()}
        body = _encode(msgspec.structs.replace(message, **values))
    return LENGTH.pack(len(body)) + body


def _expressible(value: Any, levels: int) -> Any:
    """Return a value that MessagePack can express; lists and dicts are kept down to this number of levels."""
    if isinstance(value, str):
        return _encodable(value)
    if levels and isinstance(value, dict):
        return {_encodable(str(key)): _expressible(each, levels - 1) for key, each in value.items()}
    if levels and isinstance(value, list | tuple):
        return [_expressible(each, levels - 1) for each in value]
    try:
        msgspec.msgpack.decode(_encode(value))
    except Exception:  # noqa: BLE001 - as above
        return _text_of(value)
    return value


def _text_of(value: object) -> str:
    try:
        return _encodable(repr(value))
    except Exception:  # noqa: BLE001 - __repr__ may raise any exception
        return f"<{type(value).__name__} without a text>"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


_encode = msgspec.msgpack.Encoder(enc_hook=_text_of).encode
