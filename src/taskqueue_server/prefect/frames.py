"""The frames of Prefect's task workers. The server sends only ``auth_success`` and task runs."""

from __future__ import annotations

import re
from typing import Literal, TypeVar

import msgspec

from taskqueue_core.limits import LIMITS

SUBPROTOCOL = "prefect"
AUTH_SUCCESS = '{"type":"auth_success"}'

# A Prefect worker exits after the close codes 1000 and 1001, and sometimes after `CLOSE_POLICY`. After all other codes
# it reconnects.
CLOSE_POLICY = 1008
"""after this close code, a Prefect worker exits with an error message if it has not received ``auth_success``"""
CLOSE_INTERNAL = 1011
CLOSE_RESTART = 1012
CLOSE_TRY_LATER = 1013
CLOSE_QUIT = 4000
CLOSE_PROTOCOL = 4001
CLOSE_NO_HELLO = 4408

_UNNAMEABLE = re.compile(r"[^A-Za-z0-9._:@=+<>~-]")
F = TypeVar("F", "Auth", "Subscribe")


class Violation(Exception):
    """An error for an invalid frame. Its message does not quote the frame."""


class Auth(msgspec.Struct):
    """The first frame that a Prefect worker sends."""

    type: Literal["auth"]
    token: str | None = None


class Subscribe(msgspec.Struct):
    """The second frame that a Prefect worker sends."""

    type: Literal["subscribe"]
    keys: list[str]
    client_id: str

    @property
    def worker_id(self) -> str:
        """The client id as a valid name: shortened if needed, with ``_`` in place of invalid characters."""
        name = _UNNAMEABLE.sub("_", self.client_id)[: LIMITS.name]
        return name if name[:1].isalnum() or name[:1] == "_" else f"_{name[1:]}"


class _Answer(msgspec.Struct):
    type: str


_answer = msgspec.json.Decoder(_Answer)


def decode(kind: type[F], data: str | bytes) -> F:
    """Decode a frame of the type ``kind``. Raises `Violation`."""
    name = kind.__name__.lower()
    if isinstance(data, bytes):
        raise Violation(f"{name}: expected a text message")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        needs = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise Violation(f"{name}: expected the fields {needs}") from None
    except (ValueError, RecursionError):
        raise Violation(f"{name}: expected JSON") from None


def answered(data: str | bytes) -> str:
    """Return the type of a worker's answer to a run, ``ack`` or ``quit``. Raises `Violation`."""
    if isinstance(data, bytes):
        raise Violation("ack: expected a text message")
    try:
        name = _answer.decode(data).type
    except (ValueError, RecursionError):
        raise Violation("ack: expected a JSON object with a type") from None
    if name not in {"ack", "quit"}:
        raise Violation("ack: expected the type ack or quit")
    return name
