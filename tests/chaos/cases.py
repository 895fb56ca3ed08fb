"""What the named cases share: seeds, small shapes, and an assertion that says what went wrong."""

from __future__ import annotations

import pytest

from tests.chaos.checker import Figures
from tests.chaos.world import Outcome, Shape

LEASE = 1.2
HOUSEKEEPING = 0.3
PASSES = 2 * 1.5 * HOUSEKEEPING
"""two passes of housekeeping, at their slowest"""
SLACK = 5.0
"""for a machine that does other things as well, and stands still for a while"""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 10))]
"""one among the tests, ten in `dev.py chaos`"""
CHAOS = pytest.mark.chaos
LONG = pytest.mark.long
"""not in the tests of every day, which have one case of each kind: kill, freeze, cut off, fail over"""


def small(**more: object) -> Shape:
    """Return the shape of a run that takes about two seconds."""
    fields: dict[str, object] = {
        "tasks": 300,
        "seconds": 0.5,
        "lease": LEASE,
        "housekeeping": HOUSEKEEPING,
        "answer_timeout": 0.5,
        "operation_timeout": 1.0,
    }
    return Shape(**{**fields, **more})  # type: ignore[arg-type]


def passed(outcome: Outcome) -> Figures:
    """Assert that no rule was broken, and return the figures."""
    assert outcome.verdict.ok, str(outcome.verdict)
    figures = outcome.verdict.figures
    assert figures.lost == 0
    assert figures.duplicates <= figures.held
    return figures
