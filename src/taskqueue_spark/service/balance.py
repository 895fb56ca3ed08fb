"""Comparing the journal with the ledgers of a store that is in use while both are read.

A ledger is read between two reads of the journal's end. The ledger's counts must therefore be between the journal's
counts up to the first end and up to the second end. This needs no clock and no pause. Only the growth since an earlier
comparison is checked, because a queue's journal may begin after the queue's first task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from taskqueue_core.errors import BackendUnavailable
from taskqueue_redis import RedisBackend
from taskqueue_redis.journal.reader import RedisJournalReader
from taskqueue_spark.service.state import ENDS, LIVE, Baseline, Probe, ServiceState
from taskqueue_spark.sink.store import SparkStore

_COUNTERS = ("published", *ENDS)


def read_ledgers(store: SparkStore, keys: Sequence[str]) -> Probe | None:
    """Return a Redis store's ledgers of ``keys``; ``None`` if the store is unavailable, or is reset during the read."""
    return asyncio.run(_read_ledgers(store, keys))


async def _read_ledgers(store: SparkStore, keys: Sequence[str]) -> Probe | None:
    settings = store.redis_settings()
    try:
        async with RedisJournalReader(settings) as reader:
            number = len(await reader.discover())
            backend = RedisBackend(settings=settings.model_copy(update={"partitions": number}))
            async with contextlib.aclosing(backend):
                before = [await reader.span(partition) for partition in reader.partitions]
                ledgers = await asyncio.gather(*(backend.control.ledger(key) for key in keys))
                after = [await reader.span(partition) for partition in reader.partitions]
    except BackendUnavailable:
        return None
    if [span.epoch for span in before] != [span.epoch for span in after]:
        return None
    return Probe(
        runs={shard: span.epoch for shard, span in enumerate(before)},
        names=dict(enumerate(reader.partitions)),
        before={shard: span.last for shard, span in enumerate(before)},
        after={shard: span.last for shard, span in enumerate(after)},
        ledgers={
            key: {name: getattr(ledger, name) for name in ("published", *ENDS, *LIVE)}
            for key, ledger in zip(keys, ledgers, strict=True)
        },
    )


def probe(state: ServiceState, pending: Probe) -> None:
    """Put ledgers into the state, and compare them if the journal has been read up to the time of their query."""
    counters = {
        key: {"published": books.published, **books.ended} for key, books in state.books.items()
    }
    pending.low = counters
    pending.high = {key: dict(counts) for key, counts in counters.items()}
    state.probe = pending
    resolve(state)


def resolve(state: ServiceState) -> None:
    """Compare the ledgers in the state with the journal, if it was read far enough; drop them after a store reset."""
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
                # The journal began after the queue's first task.
                state.books[key].whole = False
        text = _ledger_fault(ledger) or _difference(base, now)
        if text:
            state.differing[key] = text
        else:
            state.differing.pop(key, None)
    state.probe = None


def _ledger_fault(ledger: dict[str, int]) -> str:
    accounted = sum(ledger.get(name, 0) for name in (*ENDS, *LIVE))  # an older state lacks some
    if ledger["published"] == accounted:
        return ""
    return (
        f"published tasks in the store's ledger: {ledger['published']}, accounted for: {accounted}"
    )


def _difference(base: Baseline, now: Baseline) -> str:
    for counter in _COUNTERS:
        grown = now.ledger[counter] - base.ledger[counter]
        least = now.low.get(counter, 0) - base.high.get(counter, 0)
        most = now.high.get(counter, 0) - base.low.get(counter, 0)
        if not least <= grown <= most:
            between = str(least) if least == most else f"{least} to {most}"
            return f"{counter}: increased by {grown} in the ledger, by {between} in the journal"
    return ""
