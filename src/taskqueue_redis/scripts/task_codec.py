"""Encoding of tasks as envelopes for the store, and decoding of deliveries.

An envelope consists of::

    byte 0      version: 1, or 2 if the header has more than 65,535 bytes
    bytes 1-2   length of the header; with version 2, bytes 1-4
    header      MessagePack: the fields that are not at their defaults; empty for most tasks
    payload     JSON text, unchanged
    4 bytes     CRC-32 of all preceding bytes and the task's id

A task that got the contents of another one, and keeps its own parents or batch, has version 3: bytes 1-4 are the length
of a MessagePack map with these, which precedes the envelope of the contents.

The checksum is at the end because Lua keeps all strings in a hash table and hashes only some bytes of each, including
the last one. Without a checksum at the end, the bodies of similar tasks would have the same hash.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from taskqueue_core.after import After, TaskRef
from taskqueue_core.json_text import encode_json
from taskqueue_core.limits import check_name
from taskqueue_core.tasks import Delivery, Task, checked_task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_redis.scripts.runner import microseconds

ENTRY = 4
"""number of values per entry in the answers of the script ``receive``"""
CORRUPT = "corrupt"
"""reason of a dead letter whose envelope could not be read"""
_PLAIN = b"\x01\x00\x00"
_HEAD = len(_PLAIN)
_WIDE = b"\x02"
_REPLACED = b"\x03"
_WIDE_HEAD = 5
_LONG = 1 << 16
_CHECKSUM = 4
_OPTIONAL = (
    "tenant",
    "ordering_key",
    "deadline",
    "not_before",
    "max_attempts",
    "unique",
)
_json = msgspec.json.Encoder()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, Any])


class Corrupt(ValueError):
    """The stored bytes of a task differ from what was written."""


def encode(task: Task) -> bytes:
    """Return the envelope of a task."""
    if (
        task.tenant is None
        and task.deadline is None
        and task.not_before is None
        and task.ordering_key is None
        and task.max_attempts is None
        and task.unique is None
        and task.after is None
        and task.batch is None
        and task.content_digest is None
        and not task.tags
        and not task.headers
    ):
        body = _PLAIN + task.payload
    else:
        header = _encoder.encode(_non_default_fields(task))
        version, width = (_PLAIN[:1], 2) if len(header) < _LONG else (_WIDE, 4)
        body = version + len(header).to_bytes(width, "big") + header + task.payload
    return body + _checksum(body, task.id)


def decode(key: str, task_id: str, priority: int, envelope: bytes) -> Task:
    """Return the task in an envelope. Raises `Corrupt` if the envelope was changed."""
    if envelope.startswith(_PLAIN):  # as in `is_plain`, because most deliveries come here
        return checked_task(key, task_id, priority, _checked(envelope, task_id)[_HEAD:])
    links: dict[str, Any] | None = None
    if envelope[:1] == _REPLACED:
        start = _WIDE_HEAD + int.from_bytes(envelope[1:_WIDE_HEAD], "big")
        links, envelope = _fields(envelope[_WIDE_HEAD:start]), envelope[start:]
    version = envelope[:1]
    if version not in (_PLAIN[:1], _WIDE):
        raise Corrupt("unknown version of the envelope")
    body = _checked(envelope, task_id)
    head = _WIDE_HEAD if version == _WIDE else _HEAD
    size = head + int.from_bytes(body[1:head], "big")
    fields = _fields(body[head:size])
    own = _links(fields if links is None else links)
    fields = {name: fields[name] for name in fields if name not in ("after", "batch")}
    try:
        if "unique" in fields:
            fields["unique"] = msgspec.convert(fields["unique"], UniqueKey)
        if "tags" in fields:
            fields["tags"] = tuple(fields["tags"])
        if isinstance(known := fields.get("content_digest"), str):
            fields["content_digest"] = bytes.fromhex(known)
        return Task(key=key, id=task_id, priority=priority, payload=body[size:], **fields | own)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise Corrupt("the header cannot be read") from error


def is_plain(envelope: bytes) -> bool:
    """Return whether an envelope has no header: all fields of the task but id, payload and priority are defaults."""
    return envelope.startswith(_PLAIN)


def _checked(envelope: bytes, task_id: str) -> bytes:
    """Return an envelope without its checksum. Raises `Corrupt` if the checksum does not match."""
    body = envelope[:-_CHECKSUM]
    if _checksum(body, task_id) != envelope[-_CHECKSUM:]:
        raise Corrupt("the checksum does not match")
    return body


def _fields(header: bytes) -> dict[str, Any]:
    """Return the fields in a header. Raises `Corrupt`."""
    try:
        return _decoder.decode(header) if header else {}
    except msgspec.MsgspecError as error:
        raise Corrupt("the header cannot be read") from error


def digest(task: Task) -> bytes:
    """Return the digest of a task, which shows whether two tasks with the same id have the same content."""
    return blake2b(task.content_digest or task.payload, digest_size=8).digest()


def unique_fields(task: Task, envelope: bytes) -> bytes:
    """Return what scripts need of a task's unique key, as JSON: see ``rare_of`` in lua/lib/unusual.lua."""
    unique = task.unique
    assert unique is not None  # noqa: S101 - the caller has checked it
    fields: dict[str, str | int | bool] = {"k": unique.key, "c": unique.on_conflict}
    if unique.until == "started":
        fields["s"] = True
    if unique.period is not None:
        fields["p"] = microseconds(unique.period)
    if unique.debounce is not None:
        fields["d"] = microseconds(unique.debounce.seconds)
        if unique.debounce.max_wait is not None:
            fields["m"] = microseconds(unique.debounce.max_wait)
    if unique.on_conflict == "replace":
        fields["x"] = zlib.crc32(envelope[:-_CHECKSUM])
    return _json.encode(fields)


def _checksum(body: bytes, task_id: str) -> bytes:
    return zlib.crc32(task_id.encode(), zlib.crc32(body)).to_bytes(_CHECKSUM, "big")


def _non_default_fields(task: Task) -> dict[str, Any]:
    fields = {name: getattr(task, name) for name in _OPTIONAL}
    unusual = {name: value for name, value in fields.items() if value is not None}
    if task.headers:
        unusual["headers"] = task.headers
    if task.tags:
        unusual["tags"] = task.tags
    if task.content_digest is not None:
        unusual["content_digest"] = task.content_digest.hex()  # scripts cannot read bytes
    if task.after is not None:
        unusual["after"] = _packed(task.after)
    if task.batch is not None:
        unusual["batch"] = name_of(task.batch)
    return unusual


def name_of(ref: TaskRef) -> str:
    """Return the name of a task in scripts."""
    return f"{ref.key}/{ref.task_id}"


def ref_of(name: str) -> TaskRef:
    """Parse the name of a task in scripts."""
    key, _, task_id = name.partition("/")
    return TaskRef(key, task_id)


def _packed(after: After) -> dict[str, Any]:
    """Return what a task waits for, as lua/lib/after.lua reads it."""
    packed = {"w": after.when, "p": [name_of(parent) for parent in after.tasks], "i": after.inputs}
    return packed | {"c": True} if after.on_dead == "cancel" else packed


def _links(header: dict[str, Any]) -> dict[str, Any]:
    """Return the parents and the batch in a header, if there are any. Raises `Corrupt`."""
    links: dict[str, Any] = {}
    try:
        if "after" in header:
            links["after"] = _after(header["after"])
        if "batch" in header:
            links["batch"] = ref_of(header["batch"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corrupt("what the task waits for cannot be read") from error
    return links


def _after(packed: dict[str, Any]) -> After:
    return After(
        tasks=tuple(map(ref_of, packed["p"])),
        when=packed["w"],
        on_dead="cancel" if "c" in packed else "hold",
        inputs=tuple(packed["i"]),
    )


def deliveries_of(
    key: str,
    lane: str,
    token: str,
    at: float,
    entries: Sequence[bytes],
    *,
    timeout: bytes,
    inputs: Sequence[tuple[int, Sequence[bytes | None]]] = (),
) -> tuple[list[Delivery], list[Delivery]]:
    """Parse a list with the sequence number, id, body and counters of entries. Return good and corrupt deliveries.

    ``timeout`` is that of an attempt, in microseconds; empty if there is none. ``inputs``: the inputs of tasks that
    have some, each with the position of its entry, from 1.
    """
    of_task = dict(inputs)
    good: list[Delivery] = []
    bad: list[Delivery] = []
    tail = f".{lane}.{token}.{key}"
    priority = int(lane[1])
    for n in range(0, len(entries), ENTRY):
        number, name, body, more = entries[n : n + ENTRY]
        receipt = number.decode() + tail
        try:
            found = of_task.get(n // ENTRY + 1, ()) if of_task else ()
            task = decode(key, name.decode(), priority, body)
            good.append(_delivery(task, receipt, at, timeout, more, inputs=found))
        except ValueError:  # an unreadable entry must not prevent the delivery of the others
            task = salvage(key, _name_of(name, receipt), priority, body)
            bad.append(_delivery(task, receipt, at, b"", b""))
    return good, bad


def delivery_of(
    key: str,
    priority: int,
    receipt: str,
    at: float,
    entry: Sequence[bytes],
    *,
    timeout: bytes,
    inputs: Sequence[bytes | None] = (),
) -> Delivery:
    """Parse the id, body and counters of one entry whose receipt is known. Raises `ValueError`."""
    name, body, more = entry
    task = decode(key, name.decode(), priority, body)
    return _delivery(task, receipt, at, timeout, more, inputs=inputs)


def salvage(key: str, task_id: str, priority: int, envelope: bytes) -> Task:
    """Return a substitute for an unreadable task; its payload is the raw envelope in hexadecimal."""
    return Task(
        key=key,
        id=task_id,
        priority=priority,
        payload=encode_json("payload", envelope[:100_000].hex()),
        headers={"taskqueue-corrupt": "hexadecimal"},
    )


def _name_of(name: bytes, receipt: str) -> str:
    try:
        text = name.decode()
        check_name("id", text)
    except ValueError:
        return (
            f"corrupt:{receipt.partition('.')[0]}"  # no record has this id, so the entry is dropped
        )
    return text


def _delivery(
    task: Task,
    receipt: str,
    at: float,
    timeout: bytes,
    more: bytes,
    *,
    inputs: Sequence[bytes | None] = (),
) -> Delivery:
    # A receipt begins with the entry's sequence number, which is close to the time (microseconds) of its XADD.
    since = int(receipt.partition(".")[0]) / 1e6
    if not more and not timeout:
        return Delivery(task=task, receipt=receipt, attempt=1, delivered_at=at, waiting_since=since)
    attempt, losses, prior, _ = more.split(b":") if more else (1, 0, 0, b"")
    return Delivery(
        task=task,
        receipt=receipt,
        attempt=int(attempt),
        losses=int(losses),
        prior=int(prior),
        delivered_at=at,
        waiting_since=since,
        timeout=int(timeout) / 1e6 if timeout else None,
        inputs=tuple(inputs),
    )
