"""What the chaos tests share: seeds, shapes of short runs, and an assertion that reports broken rules."""

from __future__ import annotations

import pytest

from tests.chaos.checker import Figures
from tests.chaos.world import Outcome, Shape

LEASE = 1.2
HOUSEKEEPING = 0.3
PASSES = 2 * 1.5 * HOUSEKEEPING
"""maximum seconds until two passes of maintenance have run"""
SLACK = 5.0
"""extra seconds allowed on a machine that is busy with other work"""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 10))]
"""one seed in ordinary test runs, ten with `dev.py chaos`"""
CHAOS = pytest.mark.chaos
LONG = pytest.mark.long
"""mark for tests outside the everyday run, which has one test per kind of fault: kill, freeze, cut off, fail over"""


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
    """Assert that no rule was broken, and return the figures of the run."""
    assert outcome.verdict.ok, str(outcome.verdict)
    figures = outcome.verdict.figures
    assert figures.lost == 0
    assert figures.duplicates <= figures.held
    return figures
