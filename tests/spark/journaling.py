"""Journals in the format of the backends, with times and sizes chosen by the tests."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

from tests.redis.clusters import Cluster
from tests.redis.servers import RedisServer

START = 1_790_000_000_000_000
"""a time in microseconds since 1970"""


class Store:
    """A Redis store with nothing but journals, which are written in the format of the Lua scripts."""

    def __init__(
        self, server: RedisServer | Cluster, prefix: str, partitions: int = 1, epoch: str = ""
    ) -> None:
        """Write the metadata of an empty store."""
        self.server = server
        self.prefix = prefix
        self.names = [f"{{{prefix}:{number}}}" for number in range(partitions)]
        self.epoch = epoch or secrets.token_hex(8)
        """identifies the journal of the first partition; the other partitions append their number"""
        self.last = dict.fromkeys(self.names, 0)
        for number, name in enumerate(self.names):
            own = f"{self.epoch}{number or ''}"
            self.call(name, "HSET", f"{name}:meta", "epoch", own, "partitions", partitions)

    @property
    def options(self) -> dict[str, str]:
        """Options with which the Spark source reads this store."""
        return {"url": self.server.url, "prefix": self.prefix}

    def call(self, name: str, *words: str | bytes | float) -> Any:
        """Send a Redis command to the node that holds the partition ``name``."""
        if isinstance(self.server, Cluster):
            return self.server.call(name, *words)
        return self.server.call(*words)

    def journal(self, number: int = 0) -> str:
        """Return the key of a partition's journal stream."""
        return f"{self.names[number]}:journal"

    def write(
        self, steps: Sequence[tuple[int, Sequence[str]]], number: int = 0, **same: Any
    ) -> None:
        """Write journal entries; each step is a time and the ids of its tasks."""
        name = self.names[number]
        server = self.server.owner(name) if isinstance(self.server, Cluster) else self.server
        commands: list[tuple[str | bytes | float, ...]] = []
        for time, ids in steps:
            words = fields(time, ids, **same)
            commands.append(("XADD", self.journal(number), f"{self.last[name] + 1}-0", *words))
            self.last[name] += len(ids)
        commands.append(("HSET", f"{name}:meta", "journal_seq", self.last[name]))
        with contextlib.closing(server.connect()) as connection:
            for start in range(0, len(commands), 5000):
                connection.pipeline(commands[start : start + 5000])


def fields(time: int, ids: Sequence[str], **same: Any) -> list[str]:
    """Return the fields of one journal entry, for XADD."""
    told = {
        "v": 2, "ts": time, "event": "published", "key": "work", "state": "waiting", "worker": "", "reason": "",
        "task_id": "\0".join(ids), "attempt": 1, "losses": 0, "priority": 0, "tenant": "", "ordering_key": "",
        "due_at": "", "error": "",
    } | same  # fmt: skip
    return [str(word) for pair in told.items() for word in pair]


def line(seq: int, run: str = "r1", **more: Any) -> bytes:
    """Return one line of the memory backend's journal, in format version 2.

    Its time is ``seq`` seconds after `START`.
    """
    told = {
        "v": 2, "run": run, "seq": seq, "ts": START / 1e6 + seq, "event": "published",
        "key": "work", "task_id": f"t{seq}", "attempt": 1, "losses": 0, "state": "waiting", "priority": 0,
        "tenant": None, "worker": None, "error": None, "reason": None, "ordering_key": None, "due_at": None,
    } | more  # fmt: skip
    return json.dumps(told).encode() + b"\n"
