"""How a task lies in the store: what is not as usual, the payload as it came, and a checksum.

::

    byte 0      version, 1
    bytes 1-2   length of the header
    header      MessagePack: the fields that are not at their defaults; empty for most tasks
    payload     JSON text, never touched
    4 bytes     CRC-32 of all that stands before, then of the task's id

The checksum is at the end because Lua, which keeps each string once, finds it by a few of its bytes,
the last one among them: the bodies of like tasks must not all look the same to it.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import msgspec

from taskqueue_core.tasks import Task, stored_task

_PLAIN = b"\x01\x00\x00"
_HEAD = len(_PLAIN)
_CHECKSUM = 4
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, Any])


class Corrupt(ValueError):
    """What lies in the store is not what was written."""


def encode(task: Task) -> bytes:
    """Return the envelope of a task."""
    if (
        task.tenant is None
        and task.deadline is None
        and task.not_before is None
        and task.ordering_key is None
        and task.max_attempts is None
        and not task.headers
    ):
        body = _PLAIN + task.payload
    else:
        header = _encoder.encode(_unusual(task))
        body = _PLAIN[:1] + len(header).to_bytes(2, "big") + header + task.payload
    return body + _checksum(body, task.id)


def decode(key: str, task_id: str, priority: int, envelope: bytes) -> Task:
    """Return the task in an envelope. Raises `Corrupt`."""
    if envelope[:1] != _PLAIN[:1]:
        raise Corrupt("unknown version of the envelope")
    body = envelope[:-_CHECKSUM]
    if _checksum(body, task_id) != envelope[-_CHECKSUM:]:
        raise Corrupt("the checksum does not match")
    if body.startswith(_PLAIN):
        return stored_task(key, task_id, priority, body[_HEAD:])
    size = _HEAD + int.from_bytes(body[1:_HEAD], "big")
    try:
        unusual = _decoder.decode(body[_HEAD:size])
        return Task(key=key, id=task_id, priority=priority, payload=body[size:], **unusual)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise Corrupt("the header cannot be read") from error


def digest(payload: bytes) -> bytes:
    """Return what is kept of a payload to tell another from the same."""
    return hashlib.blake2b(payload, digest_size=8).digest()


def _checksum(body: bytes, task_id: str) -> bytes:
    return zlib.crc32(task_id.encode(), zlib.crc32(body)).to_bytes(_CHECKSUM, "big")


def _unusual(task: Task) -> dict[str, Any]:
    fields = {
        name: getattr(task, name)
        for name in ("tenant", "ordering_key", "deadline", "not_before", "max_attempts")
    }
    unusual = {name: value for name, value in fields.items() if value is not None}
    if task.headers:
        unusual["headers"] = task.headers
    return unusual
