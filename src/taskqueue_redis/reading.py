"""From entries of the store to deliveries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskqueue_core.tasks import Delivery, Task, encode_json
from taskqueue_redis.envelope import Corrupt, decode

__all__ = ["CORRUPT", "deliveries_of", "delivery_of", "salvaged"]

_PLAIN = 4
"""names and values of an entry that was never returned or retried"""
CORRUPT = "corrupt"
"""the reason of a dead letter whose envelope could not be read"""


def deliveries_of(
    key: str, lane: str, token: str, at: float, entries: Sequence[Any]
) -> tuple[list[Delivery], list[Delivery]]:
    """Read the entries of one stream. Return the deliveries, and those whose envelope is corrupt."""
    good: list[Delivery] = []
    bad: list[Delivery] = []
    tail = f".{lane}.{token}.{key}"
    priority = int(lane[1])
    for entry_id, fields in entries:
        receipt = entry_id[:-2].decode() + tail
        task_id = fields[1].decode()
        try:
            task = decode(key, task_id, priority, fields[3])
        except Corrupt:
            bad.append(_delivery(salvaged(key, task_id, priority, fields[3]), receipt, at, fields))
        else:
            good.append(_delivery(task, receipt, at, fields))
    return good, bad


def delivery_of(key: str, lane: str, receipt: str, at: float, fields: Sequence[bytes]) -> Delivery:
    """Read the fields of one entry whose receipt is known. Raises `Corrupt`."""
    task = decode(key, fields[1].decode(), int(lane[1]), fields[3])
    return _delivery(task, receipt, at, fields)


def salvaged(key: str, task_id: str, priority: int, envelope: bytes) -> Task:
    """Return a task that holds the raw bytes of an unreadable envelope, in hexadecimal."""
    return Task(
        key=key,
        id=task_id,
        priority=priority,
        payload=encode_json("payload", envelope[:100_000].hex()),
        headers={"taskqueue-corrupt": "hexadecimal"},
    )


def _delivery(task: Task, receipt: str, at: float, fields: Sequence[bytes]) -> Delivery:
    if len(fields) == _PLAIN:
        return Delivery(task=task, receipt=receipt, attempt=1, delivered_at=at)
    attempt, losses, prior = map(int, fields[5].split(b":"))
    return Delivery(
        task=task, receipt=receipt, attempt=attempt, losses=losses, prior=prior, delivered_at=at
    )
