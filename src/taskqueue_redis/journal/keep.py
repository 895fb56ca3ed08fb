"""Saving a journal to a file: entry point ``redis`` of the group ``taskqueue.journals``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.config import load_settings
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.journal.reader import (
    COLUMNS,
    HEAD,
    JOURNAL_VERSION,
    JournalEntry,
    RedisJournalReader,
    entries_of,
)

_URL = "TASKQUEUE_REDIS_URL"
_SLACK = 60.0
"""seconds by which the clocks of this machine and of the store may differ"""
_MICROSECONDS = 1_000_000
_encoder = msgspec.json.Encoder()


def variables(path: Path) -> Mapping[str, str]:  # noqa: ARG001 - the Redis backend writes no journal file
    """Return no environment variables, because Redis keeps the journal itself."""
    return {}


async def keep_journal(key: str, path: Path, since: float, store: Mapping[str, str]) -> None:
    """Write a queue's state changes to ``path`` as JSON lines, beginning a minute before ``since``.

    Changes that are no longer stored leave gaps in ``seq``.
    """
    settings = RedisSettings(url=store[_URL]) if _URL in store else load_settings(RedisSettings)  # type: ignore[arg-type]
    wanted = key.encode()
    began = int((since - _SLACK) * _MICROSECONDS)
    async with RedisJournalReader(settings) as reader:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for shard, partition in enumerate(await reader.discover()):
                span = await reader.span(partition)
                start = expected = await reader.at(partition, began)
                number = 1 if start == span.first > 1 else 0
                async for reply in reader.read(partition, start, span.last):
                    for entry in entries_of(reply):
                        if not entry.size:
                            continue  # the entry was not written by this package
                        number += expected != entry.seq
                        expected = entry.seq + entry.size
                        if entry.values[HEAD.index("key")] == wanted:
                            for line in lines_of(entry, f"{span.epoch}.{shard}", number):
                                file.write(_encoder.encode(line) + b"\n")
                                number += 1


def lines_of(entry: JournalEntry, run: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield each state change of an entry as a journal line. The first line has the number ``number`` + 1."""
    head = dict(zip(HEAD, map(bytes.decode, entry.values), strict=False))
    columns = [
        parts if len(parts) == entry.size else parts * entry.size
        for parts in (value.decode().split("\0") for value in entry.values[len(HEAD) :])
    ]
    for index, values in enumerate(zip(*columns, strict=True), start=number + 1):
        own = dict(zip(COLUMNS, values, strict=True))
        yield {
            "v": JOURNAL_VERSION,
            "run": run,
            "seq": index,
            "ts": int(head["ts"]) / _MICROSECONDS,
            "event": head["event"],
            "key": head["key"],
            "task_id": own["task_id"],
            "attempt": int(own["attempt"] or 0),
            "losses": int(own["losses"] or 0),
            "state": head["state"],
            "priority": int(own["priority"] or 0),
            "tenant": own["tenant"] or None,
            "worker": head["worker"] or None,
            "error": own["error"] or None,
            "reason": head["reason"] or None,
            "ordering_key": own["ordering_key"] or None,
            "due_at": int(own["due_at"]) / _MICROSECONDS if own["due_at"] else None,
        }
