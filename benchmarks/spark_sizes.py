"""The sizes of the pipeline's benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

SECTIONS = ("cost", "read", "publish", "audit", "virtual", "applied")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of one round."""

    rounds: int
    cost: int
    """number of tasks that are published and drained with and without the journal, in each of five repetitions"""
    transitions: int
    """number of changes of state in the journals that are read"""
    publish: int
    """number of tasks that are published through the sink"""
    events: int
    """number of events in the audited journal; ten times as many for the growth of its cost"""
    loads: int
    """number of loads in virtual time, each recorded and then executed with the advised number of slots"""
    tasks: int
    """number of tasks in each load in virtual time"""
    seconds: float
    """duration of a load in real time"""


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
