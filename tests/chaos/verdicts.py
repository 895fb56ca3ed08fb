"""What the checker says of histories that were made by hand."""

from __future__ import annotations

from tests.chaos.checker import Verdict, check
from tests.chaos.synthetic import Simulation


def broken(verdict: Verdict) -> set[str]:
    """The rules that were broken."""
    return {violation.rule for violation in verdict.violations}


def finished(run: Simulation) -> Verdict:
    """Check a history after its tasks have been brought to their end."""
    for receipt, (_, holder) in list(run.held.items()):
        run.settle(holder, receipt, "ack")
    run.drain("c2")
    return check(run.events, run.dump())
