"""Waiting for replicas before something is confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from taskqueue_redis.failures import AnswerLost
from taskqueue_redis.scripts import Scripts, Word

__all__ = ["Confirming"]

_REMEMBERED = 10_000


class Confirming:
    """Runs scripts whose answer counts only once enough replicas have what they wrote."""

    def __init__(self, scripts: Scripts, timeout: float) -> None:
        """Wait up to ``timeout`` seconds, less than a connection waits for any answer."""
        self._scripts = scripts
        self._timeout = timeout
        self._replicated: set[str] = set()
        """keys of queues that wait for replicas, as far as is known"""

    async def run(self, name: str, partition: str, keys: Iterable[str], *words: Word) -> Any:
        """Run an idempotent script that answers its result and how many replicas must have it; return its result.

        Raises `AnswerLost` where the replicas do not confirm in time, and what `Scripts.run` raises.
        """
        if self._replicated.isdisjoint(keys):
            result, replicas = await self._scripts.run(name, partition, *words)
            if not replicas:
                return result
            # WAIT counts what was written by its own connection, and to the master of that moment: so the whole again,
            # which changes nothing where the first time counts, and is made up for where a failover came between.
            if len(self._replicated) < _REMEMBERED:
                self._replicated.update(keys)
            (_, replicas), reached = await self._scripts.run(
                name, partition, *words, follow=self._wait
            )
        else:
            (result, replicas), reached = await self._scripts.run(
                name, partition, *words, follow=self._wait
            )
        if replicas and (reached or 0) < replicas:
            raise AnswerLost(f"{reached} of {replicas} replicas have confirmed")
        return result

    def _wait(self, told: Any) -> Sequence[Word] | None:
        return ("WAIT", told[1], round(self._timeout * 1000)) if told[1] else None
