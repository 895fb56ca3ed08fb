"""Comparing the journal with the ledgers of a store that goes on working while both are read.

A ledger is read between two looks at how far the journal had got; so it must lie between what the journal
tells up to the first and up to the second. No clock is needed, and no pause. What is compared is how much both have
grown, as a queue's journal may have begun after its first task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from taskqueue_core.errors import BackendUnavailable
from taskqueue_redis import RedisBackend
from taskqueue_redis.journal.reader import RedisJournalReader
from taskqueue_spark.options import redis_settings
from taskqueue_spark.service.state import ENDS, LIVE, Baseline, Probe, ServiceBooks, ServiceState

_COUNTERS = ("published", *ENDS)


class StoreAnswers(NamedTuple):
    """Ledgers by key; and by shard its run, its name, and how far it was just before and just after these were read."""

    runs: dict[int, str]
    names: dict[int, str]
    before: dict[int, int]
    after: dict[int, int]
    ledgers: dict[str, dict[str, int]]


@dataclass(frozen=True)
class RedisLedgers:
    """Asks the Redis that a source reads; what is not told here, ``TASKQUEUE_REDIS_…`` tells."""

    url: str | None
    url_env: str | None
    prefix: str | None
    partitions: int | None

    def __call__(self, keys: Sequence[str]) -> StoreAnswers | None:
        """Return the ledgers; ``None`` if the store is unavailable, or was reset in between."""
        return asyncio.run(self._ask(keys))

    async def _ask(self, keys: Sequence[str]) -> StoreAnswers | None:
        settings = redis_settings(self.url, self.url_env, self.prefix, self.partitions)
        try:
            async with RedisJournalReader(settings) as reader:
                number = len(await reader.discover())
                backend = RedisBackend(settings=settings.model_copy(update={"partitions": number}))
                try:
                    before = [await reader.span(partition) for partition in reader.partitions]
                    ledgers = await asyncio.gather(*(backend.control.ledger(key) for key in keys))
                    after = [await reader.span(partition) for partition in reader.partitions]
                finally:
                    await backend.aclose()
        except BackendUnavailable:
            return None
        if [span.epoch for span in before] != [span.epoch for span in after]:
            return None
        fields = {
            key: {
                "published": ledger.published,
                **{name: getattr(ledger, name) for name in (*ENDS, *LIVE)},
            }
            for key, ledger in zip(keys, ledgers, strict=True)
        }
        first, second = (
            {n: span.last for n, span in enumerate(spans)} for spans in (before, after)
        )
        runs = {n: span.epoch for n, span in enumerate(before)}
        return StoreAnswers(runs, dict(enumerate(reader.partitions)), first, second, fields)


def probe(state: ServiceState, requested: StoreAnswers) -> None:
    """Remember ledgers until the journal has been read up to where they were; compare at once if it has."""
    state.probe = Probe(
        runs=requested.runs,
        names=requested.names,
        before=requested.before,
        after=requested.after,
        ledgers=requested.ledgers,
        low={key: _counters(books) for key, books in state.books.items()},
        high={key: _counters(books) for key, books in state.books.items()},
    )
    resolve(state)


def resolve(state: ServiceState) -> None:
    """Compare what was remembered, once the journal has been read far enough."""
    pending = state.probe
    if pending is None:
        return
    current = state.current()
    if any(run not in current.get(shard, [run]) for shard, run in pending.runs.items()):
        state.probe, state.baselines, state.differing = None, {}, {}
        return
    for shard, number in pending.after.items():
        run = pending.runs[shard]
        position = state.position(run, shard)
        passed = state.offsets.get(f"{run}/{pending.names[shard]}", 0) - 1
        if max(position.last if position else 0, passed) < number:
            return
    for key, ledger in pending.ledgers.items():
        now = Baseline(
            runs=pending.runs,
            ledger=ledger,
            low=pending.low.get(key, {}),
            high=pending.high.get(key, {}),
        )
        base = state.baselines.get(key)
        if base is None or base.runs != now.runs or ledger["published"] < base.ledger["published"]:
            state.baselines[key] = base = now
            if ledger["published"] > now.high.get("published", 0):
                state.books[key].whole = False  # there were tasks before there was a journal
        text = _own(ledger) or _differing(base, now)
        if text:
            state.differing[key] = text
        else:
            state.differing.pop(key, None)
    state.probe = None


def _counters(books: ServiceBooks) -> dict[str, int]:
    return {"published": books.published, **books.ended}


def _own(ledger: dict[str, int]) -> str:
    accounted = sum(ledger[name] for name in (*ENDS, *LIVE))
    if ledger["published"] == accounted:
        return ""
    return f"the store's ledger has {ledger['published']} published and accounts for {accounted}"


def _differing(base: Baseline, now: Baseline) -> str:
    for counter in _COUNTERS:
        grown = now.ledger[counter] - base.ledger[counter]
        least = now.low.get(counter, 0) - base.high.get(counter, 0)
        most = now.high.get(counter, 0) - base.low.get(counter, 0)
        if not least <= grown <= most:
            between = str(least) if least == most else f"{least} to {most}"
            return f"{counter}: {grown} more by the ledger, {between} by the journal"
    return ""
