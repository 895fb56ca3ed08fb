"""Helpers for testing the checker on handmade histories."""

from __future__ import annotations

from tests.chaos.checker import Verdict, check
from tests.chaos.synthetic import Simulation


def broken(verdict: Verdict) -> set[str]:
    """Return the names of the rules that were broken."""
    return {violation.rule for violation in verdict.violations}


def finished(run: Simulation) -> Verdict:
    """Settle and drain all tasks of a simulation, then check its history."""
    for receipt, (_, holder) in list(run.held.items()):
        run.settle(holder, receipt, "ack")
    run.drain("c2")
    return check(run.events, run.dump())
