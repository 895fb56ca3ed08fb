"""The protocol of lines between partitions, under loss, repetition and reordering."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.clock import SystemClock
from taskqueue_core.recordstore import RecordBackend
from taskqueue_memory import MemoryBackend
from tests.core.dict_store import DictStore, Disk
from tests.core.line_histories import History

_STEPS = 50
_MANY = int(os.environ.get("TASKQUEUE_LINE_HISTORIES", "1500"))
"""number of histories in the long test; `dev.py soak` sets it high"""


async def play(number: int, *, record_store: bool) -> Counter[str]:
    """Play ``number`` histories in three stores, and return what happened in them."""
    counts = Counter[str]()
    for seed in range(number):
        second: Backend = MemoryBackend()
        if record_store:
            second = RecordBackend("record", DictStore(Disk()), SystemClock(), durable=True)
        history = History([MemoryBackend(), second, MemoryBackend()], random.Random(seed))
        try:
            await history.play(_STEPS)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        counts += history.counts
        counts["histories"] += 1
    return counts


@pytest.mark.parametrize(
    ("number", "record_store"),
    [(300, False), (20, True), pytest.param(_MANY, False, marks=pytest.mark.long)],
)
async def test_histories(number: int, *, record_store: bool) -> None:
    """U16, fault A1: no task is released early, twice or never, however lines are lost, repeated and reordered."""
    counts = await play(number, record_store=record_store)
    assert counts["histories"] == number
    assert counts["done"] + counts["ended"] + counts["failed"] > 3 * number, "released tasks"
    for event in ("done", "ended", "failed", "lost", "repeated", "parent_ended", "unknown_parent"):
        assert counts[event] > number / 50, event
