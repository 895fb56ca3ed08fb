"""Journals that tests write as the backends do, at times and of sizes that they choose."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

from tests.redis.clusters import Cluster
from tests.redis.servers import RedisServer

START = 1_790_000_000_000_000
"""a time in microseconds"""


class Store:
    """An installation that has nothing but journals: steps are written as the scripts write them."""

    def __init__(
        self, server: RedisServer | Cluster, prefix: str, partitions: int = 1, epoch: str = ""
    ) -> None:
        """Write what an installation begins with."""
        self.server = server
        self.prefix = prefix
        self.names = [f"{{{prefix}:{number}}}" for number in range(partitions)]
        self.epoch = epoch or secrets.token_hex(8)
        """of the first partition: each has one of its own"""
        self.last = dict.fromkeys(self.names, 0)
        for number, name in enumerate(self.names):
            own = f"{self.epoch}{number or ''}"
            self.call(name, "HSET", f"{name}:meta", "epoch", own, "partitions", partitions)

    @property
    def options(self) -> dict[str, str]:
        """What the source is told."""
        return {"url": self.server.url, "prefix": self.prefix}

    def call(self, name: str, *words: str | bytes | float) -> Any:
        """Send one command to where a partition lives."""
        if isinstance(self.server, Cluster):
            return self.server.call(name, *words)
        return self.server.call(*words)

    def journal(self, number: int = 0) -> str:
        """Return the stream's key."""
        return f"{self.names[number]}:journal"

    def write(
        self, steps: Sequence[tuple[int, Sequence[str]]], number: int = 0, **same: Any
    ) -> None:
        """Write steps, each a time and the ids of its tasks."""
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
    """Return the words of an entry."""
    told = {
        "v": 2, "ts": time, "event": "published", "key": "work", "state": "waiting", "worker": "", "reason": "",
        "task_id": "\0".join(ids), "attempt": 1, "losses": 0, "priority": 0, "tenant": "", "ordering_key": "",
        "due_at": "", "error": "",
    } | same  # fmt: skip
    return [str(word) for pair in told.items() for word in pair]


def line(seq: int, run: str = "r1", **more: Any) -> bytes:
    """Return a line of the memory backend's journal, of version 2: one per second."""
    told = {
        "v": 2, "run": run, "seq": seq, "ts": START / 1e6 + seq, "event": "published",
        "key": "work", "task_id": f"t{seq}", "attempt": 1, "losses": 0, "state": "waiting", "priority": 0,
        "tenant": None, "worker": None, "error": None, "reason": None, "ordering_key": None, "due_at": None,
    } | more  # fmt: skip
    return json.dumps(told).encode() + b"\n"
