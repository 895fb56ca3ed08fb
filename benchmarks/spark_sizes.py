"""How much of the pipeline is measured."""

from __future__ import annotations

from dataclasses import dataclass

SECTIONS = ("cost", "read", "publish", "audit", "virtual", "applied")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one round."""

    rounds: int
    cost: int
    """tasks published and drained with the journal off, and on, in each of five turns"""
    transitions: int
    """of the journals that are read"""
    publish: int
    """tasks"""
    events: int
    """of the audit; ten times as many where its growth is looked at"""
    loads: int
    """loads in virtual time, each recorded and then applied"""
    tasks: int
    """of each of them"""
    seconds: float
    """a load in real time lasts"""


SIZES = {
    "quick": Sizes(
        rounds=1, cost=5_000, transitions=100_000, publish=40_000, events=100_000, loads=2, tasks=10_000, seconds=8.0
    ),
    "usual": Sizes(
        rounds=3, cost=20_000, transitions=600_000, publish=200_000, events=1_000_000, loads=4, tasks=20_000,
        seconds=45.0,
    ),
    "full": Sizes(
        rounds=5, cost=40_000, transitions=2_000_000, publish=400_000, events=1_000_000, loads=6, tasks=50_000,
        seconds=60.0,
    ),
}  # fmt: skip
