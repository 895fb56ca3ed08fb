"""From entries of the store to deliveries."""

from __future__ import annotations

from collections.abc import Sequence

from taskqueue_core.limits import check_name
from taskqueue_core.tasks import Delivery, Task, encode_json
from taskqueue_redis.scripts.task_codec import decode

ENTRY = 4
"""values that a script gives per entry"""
CORRUPT = "corrupt"
"""the reason of a dead letter whose envelope could not be read"""


def deliveries_of(
    key: str, lane: str, token: str, at: float, entries: Sequence[bytes]
) -> tuple[list[Delivery], list[Delivery]]:
    """Read entries of one stream: sequence, id, body and more of each, one after another.

    Return the deliveries, and those whose envelope is corrupt.
    """
    good: list[Delivery] = []
    bad: list[Delivery] = []
    tail = f".{lane}.{token}.{key}"
    priority = int(lane[1])
    for n in range(0, len(entries), ENTRY):
        receipt = entries[n].decode() + tail
        entry = entries[n + 1 : n + ENTRY]
        try:
            good.append(delivery_of(key, priority, receipt, at, entry))
        except ValueError:  # whatever it is, it must not take the others of the answer along
            task = salvaged(key, _name_of(entry[0], receipt), priority, entry[1])
            bad.append(_delivery(task, receipt, at, b""))
    return good, bad


def delivery_of(
    key: str, priority: int, receipt: str, at: float, entry: Sequence[bytes]
) -> Delivery:
    """Read the id, body and more of one entry whose receipt is known. Raises `ValueError`."""
    name, body, more = entry
    return _delivery(decode(key, name.decode(), priority, body), receipt, at, more)


def salvaged(key: str, task_id: str, priority: int, envelope: bytes) -> Task:
    """Return a task that holds the raw bytes of an unreadable envelope, in hexadecimal."""
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
            f"corrupt:{receipt.partition('.')[0]}"  # no record has it, so the entry is just dropped
        )
    return text


def _delivery(task: Task, receipt: str, at: float, more: bytes) -> Delivery:
    # A receipt begins with the sequence of its entry: the microseconds at which that came into its lane.
    since = int(receipt.partition(".")[0]) / 1e6
    if not more:
        return Delivery(task=task, receipt=receipt, attempt=1, delivered_at=at, waiting_since=since)
    attempt, losses, prior, _ = more.split(b":")
    return Delivery(
        task=task,
        receipt=receipt,
        attempt=int(attempt),
        losses=int(losses),
        prior=int(prior),
        delivered_at=at,
        waiting_since=since,
    )
