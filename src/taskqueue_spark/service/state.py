"""The state of the streaming service after a batch: one file, whose replacement commits the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.pipeline.tables import replace_file

VERSION = 1
LIVE = ("waiting", "scheduled", "in_flight", "dead")
"""states of tasks that the store still has"""
ENDS = ("done", "expired", "cancelled", "discarded")


class Position(msgspec.Struct, kw_only=True):
    """How far the transitions of a run and shard were read."""

    last: int
    """the highest number"""
    missing: int = 0
    """how many lower numbers are missing"""
    since: float
    """time of the first transition that was read"""
    until: float


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """A break in a journal."""

    kind: Literal["missing", "reset", "back"]
    """``missing``: missing transitions; ``reset``: another run of the shard, because the store was emptied; ``back``:
    numbers that were used again, because the store was restored without its latest transitions"""
    shard: int
    run: str
    first: int
    last: int
    """the last number of the gap; ``first`` is the first one"""
    number: int
    """number of transitions that are missing or whose numbers were used again, or of lost tasks"""
    at: float


class QueueCounts(msgspec.Struct, kw_only=True):
    """The counts of a queue's tasks in the journal. Each life of a task counts."""

    published: int = 0
    adopted: int = 0
    """tasks whose beginning is not in the journal, or that ended twice"""
    doubled: int = 0
    """tasks that were published while they existed"""
    expired: int = 0
    """tasks that were live when their store was reset"""
    ended: dict[str, int] = {}
    live: dict[str, int] = {}
    events: dict[str, int] = {}
    whole: bool = True
    """whether the journal contains this queue from its first task on"""

    @property
    def imbalance(self) -> int:
        """The number of published tasks that are in no other count."""
        return self.published - sum(self.ended.values()) - sum(self.live.values()) - self.expired

    @property
    def balanced(self) -> bool | None:
        """Whether every task is accounted for; ``None`` if the journal is incomplete."""
        if not self.whole:
            return None
        return not (self.imbalance or self.adopted or self.doubled)


class WindowCounts(msgspec.Struct, kw_only=True):
    """The counts of a queue in one window."""

    events: dict[str, int] = {}
    waits: dict[int, int] = {}
    """number of tasks by class of their waiting time, see `windows.seconds_of`"""
    runs: dict[int, int] = {}


class FailureTrend(msgspec.Struct, kw_only=True):
    """A time in which a larger share of a queue's executions failed than before."""

    key: str
    window: int
    """the first window"""
    share: float
    usual: float
    """the share of earlier windows"""
    executions: int
    over: bool = False


class Probe(msgspec.Struct, kw_only=True):
    """The ledgers at a time up to which the journal has not been read yet."""

    runs: dict[int, str]
    """by shard"""
    names: dict[int, str]
    """names of shards in the source"""
    before: dict[int, int]
    """by shard, the last number before the ledgers were read"""
    after: dict[int, int]
    ledgers: dict[str, dict[str, int]]
    low: dict[str, dict[str, int]] = {}
    """by key and counter, the count in the journal up to ``before``"""
    high: dict[str, dict[str, int]] = {}


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's ledger, with bounds of the journal's counts at that time."""

    runs: dict[int, str]
    ledger: dict[str, int]
    low: dict[str, int]
    high: dict[str, int]


class ServiceState(msgspec.Struct, kw_only=True):
    """The state after a batch."""

    version: int = VERSION
    queries: dict[str, int] = {}
    """the last batch of each query; a lost checkpoint leads to a second query"""
    open: str = ""
    """the folder of the live tasks"""
    transitions: int = 0
    damaged: int = 0
    frontier: float = 0.0
    """time of the last transition that was read, without times in the future"""
    positions: dict[str, Position] = {}
    """by ``run/shard``"""
    offsets: dict[str, int] = {}
    """by ``run/name``, the end of the last batch, if the source has such offsets"""
    books: dict[str, QueueCounts] = {}
    windows: dict[str, dict[int, WindowCounts]] = {}
    """by key and start, the latest windows"""
    gaps: list[Gap] = []
    """the latest of them"""
    horizon: int = 0
    """windows that began earlier are closed"""
    late: int = 0
    """number of transitions of closed windows: they are in the archive, but in no window"""
    rises: list[FailureTrend] = []
    """the latest of them"""
    checked: int = msgspec.field(default=0, name="judged")
    """the last window that was checked for rising failures"""
    probe: Probe | None = None
    baselines: dict[str, Baseline] = {}
    differing: dict[str, str] = {}
    """by key, how the ledger of the store differs from the journal"""

    def current(self) -> dict[int, list[str]]:
        """Return by shard the runs that may continue: no other run began after their last transition.

        A store that was emptied and a process that was restarted begin a new run, and the live tasks of the former
        run are gone.
        """
        of: dict[int, list[tuple[str, Position]]] = {}
        for location, position in self.positions.items():
            run, _, shard = location.rpartition("/")
            of.setdefault(int(shard), []).append((run, position))
        latest = {shard: max(position.since for _, position in runs) for shard, runs in of.items()}
        return {
            shard: [run for run, position in runs if position.until >= latest[shard]]
            for shard, runs in of.items()
        }

    def position(self, run: str, shard: int) -> Position | None:
        """Return how far a run was read."""
        return self.positions.get(f"{run}/{shard}")


def load(path: Path) -> ServiceState:
    """Return the saved state, or an empty one. Raises `ConfigurationError` for a file of another kind."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=ServiceState)
    except FileNotFoundError:
        return ServiceState()
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path}: not a state file of the streaming service") from error
    if state.version != VERSION:
        raise ConfigurationError(
            f"{path}: written by another version of the streaming service ({state.version}; allowed: {VERSION})"
        )
    return state


def save(path: Path, state: ServiceState) -> None:
    """Replace the state by one rename, durably."""
    replace_file(path, msgspec.json.encode(state))
