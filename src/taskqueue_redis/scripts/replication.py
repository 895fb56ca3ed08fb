"""Waiting for replicas before something is confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from taskqueue_redis.connection.failures import AnswerLost
from taskqueue_redis.scripts.runner import Arg, Scripts

_REMEMBERED = 10_000


class ReplicaWait:
    """Runs scripts whose answer counts only once enough replicas have what they wrote."""

    def __init__(self, scripts: Scripts, timeout: float) -> None:
        """Wait up to ``timeout`` seconds, less than a connection waits for any answer."""
        self._scripts = scripts
        self._timeout = timeout
        self._replicated: set[str] = set()
        """keys of queues that wait for replicas, as far as is known"""

    def waits_for(self, keys: Iterable[str]) -> bool:
        """Say whether one of these queues is known to wait for replicas."""
        return not self._replicated.isdisjoint(keys)

    async def run(self, name: str, partition: str, keys: Iterable[str], *args: Arg) -> list[Any]:
        """Run an idempotent script that answers how many replicas must have it, and its results; return these.

        Raises `AnswerLost` where the replicas do not confirm in time, and what `Scripts.run` raises.
        """
        reply: list[Any]
        if not self.waits_for(keys):
            reply = await self._scripts.run(name, partition, *args)
            if not reply[0]:
                return reply[1:]
            # WAIT counts what was written by its own connection, and to the master of that moment: so the whole again,
            # which changes nothing where the first time counts, and is made up for where a failover came between.
            if len(self._replicated) < _REMEMBERED:
                self._replicated.update(keys)
            again, reached = await self._scripts.run(name, partition, *args, follow=self._wait)
            reply[0] = again[0]
        else:
            reply, reached = await self._scripts.run(name, partition, *args, follow=self._wait)
        if reply[0] and (reached or 0) < reply[0]:
            raise AnswerLost(f"{reached} of {reply[0]} replicas have confirmed")
        return reply[1:]

    def _wait(self, reply: Any) -> Sequence[Arg] | None:
        return ("WAIT", reply[0], round(self._timeout * 1000)) if reply[0] else None
