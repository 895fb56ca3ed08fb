"""Streams under faults: readers miss no event and get none twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cases import CHAOS
from tests.chaos.streaming import FAULTS, Seen, carry_out, violations

WHOLE = [
    Seen("1-1", "attempt", 1), Seen("1-2", "data", 0),
    Seen("2-3", "attempt", 2), Seen("2-4", "data", 0), Seen("2-5", "data", 1), Seen("2-6", "end", "done"),
]  # fmt: skip


@CHAOS
async def test_none_missing_and_none_doubled(folder: Path) -> None:
    """U19, law 12, faults A1, A6, B1: kills of the worker, the server and the store; each event is read once."""
    outcome = await carry_out(folder, tasks=10, number=400)
    assert outcome.violations == []
    assert outcome.connects > 10 * FAULTS.count("server")
    assert outcome.attempts > 10
    assert max(outcome.memory) < min(outcome.memory) + 64


@pytest.mark.parametrize(
    ("events", "found"),
    [
        (WHOLE, 0),
        (WHOLE[:4] + WHOLE[5:], 2),
        (WHOLE[:5] + WHOLE[4:], 2),
        (WHOLE[:-1], 2),
        ([], 2),
        ([*WHOLE[:4], Seen("2-5", "trimmed", 1), WHOLE[-1]], 2),
    ],
    ids=["whole", "missing", "doubled", "no end", "nothing", "cut"],
)
def test_violations(events: list[Seen], found: int) -> None:
    """The checker of a run finds an event that is missing, doubled or cut, and a missing end."""
    assert len(violations(events, 2)) == found
