"""How a task lies in the store: a version, a checksum, what is not as usual, and the payload as it came.

::

    byte 0      version, 1
    bytes 1-4   CRC-32 of all that follows, then of the task's id
    bytes 5-6   length of the header
    header      MessagePack: the fields that are not at their defaults; empty for most tasks
    payload     JSON text, never touched
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import msgspec

from taskqueue_core.tasks import Task, stored_task

__all__ = ["Corrupt", "decode", "digest", "encode"]

_VERSION = b"\x01"
_HEAD = 7
_PLAIN = b"\x00\x00"
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
        rest = _PLAIN + task.payload
    else:
        header = _encoder.encode(_unusual(task))
        rest = len(header).to_bytes(2, "big") + header + task.payload
    checksum = zlib.crc32(task.id.encode(), zlib.crc32(rest))
    return _VERSION + checksum.to_bytes(4, "big") + rest


def decode(key: str, task_id: str, priority: int, envelope: bytes) -> Task:
    """Return the task in an envelope. Raises `Corrupt`."""
    if envelope[:1] != _VERSION:
        raise Corrupt("unknown version of the envelope")
    checksum = zlib.crc32(task_id.encode(), zlib.crc32(envelope[5:]))
    if checksum.to_bytes(4, "big") != envelope[1:5]:
        raise Corrupt("the checksum does not match")
    if envelope[5:_HEAD] == _PLAIN:
        return stored_task(key, task_id, priority, envelope[_HEAD:])
    size = _HEAD + int.from_bytes(envelope[5:_HEAD], "big")
    try:
        unusual = _decoder.decode(envelope[_HEAD:size])
        return Task(key=key, id=task_id, priority=priority, payload=envelope[size:], **unusual)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise Corrupt("the header cannot be read") from error


def digest(payload: bytes) -> bytes:
    """Return what is kept of a payload to tell another from the same."""
    return hashlib.blake2b(payload, digest_size=8).digest()


def _unusual(task: Task) -> dict[str, Any]:
    fields = {
        name: getattr(task, name)
        for name in ("tenant", "ordering_key", "deadline", "not_before", "max_attempts")
    }
    unusual = {name: value for name, value in fields.items() if value is not None}
    if task.headers:
        unusual["headers"] = task.headers
    return unusual
