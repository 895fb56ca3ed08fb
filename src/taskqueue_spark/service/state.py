"""The state of the streaming service after a batch: one file, whose replacement commits the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.pipeline.tables import replace_file

VERSION = 1
LIVE = ("blocked", "waiting", "scheduled", "in_flight", "dead")
"""states in which a task is still in the store"""
ENDS = ("done", "expired", "cancelled", "discarded")


class Position(msgspec.Struct, kw_only=True):
    """A record of how far the transitions of a run and shard have been read."""

    last: int
    """the highest number that was read"""
    missing: int = 0
    """number of missing transitions with numbers below ``last``"""
    since: float
    """Unix time of the first transition that was read"""
    until: float


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """An interruption of the numbers of a journal."""

    kind: Literal["missing", "reset", "back"]
    """``missing``: transitions are missing; ``reset``: another run of the shard began, because the store was emptied or
    its process restarted; ``back``: numbers were used again, because the store was restored without its latest
    transitions"""
    shard: int
    run: str
    first: int
    last: int
    """the last number of the gap; ``first`` is its first number"""
    number: int
    """number of transitions that are missing or whose numbers were used again; for ``reset``, number of lost tasks"""
    at: float


class QueueCounts(msgspec.Struct, kw_only=True):
    """The counts of a queue's tasks in the journal. Each life of a task counts separately."""

    published: int = 0
    adopted: int = 0
    """number of tasks whose beginning is not in the journal, or that ended twice"""
    doubled: int = 0
    """number of tasks that were published while they already existed"""
    expired: int = 0
    """number of tasks that were live when their store was reset"""
    ended: dict[str, int] = {}
    live: dict[str, int] = {}
    events: dict[str, int] = {}
    whole: bool = True
    """whether the journal contains the whole history of this queue"""

    @property
    def imbalance(self) -> int:
        """The number of published tasks that no other count contains; negative if the other counts have more tasks."""
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
    """number of tasks by class of waiting time, as in `windows.seconds_of`"""
    runs: dict[int, int] = {}


class FailureTrend(msgspec.Struct, kw_only=True):
    """An episode in which a larger share of a queue's executions failed than before."""

    key: str
    window: int
    """start of the first window of the episode (Unix seconds)"""
    share: float
    usual: float
    """the share of failures in earlier windows"""
    executions: int
    over: bool = False


class Probe(msgspec.Struct, kw_only=True):
    """Ledgers of a store, kept until the journal has been read up to the time of their query."""

    runs: dict[int, str]
    """the run of each shard"""
    names: dict[int, str]
    """the names that the source gives to the shards"""
    before: dict[int, int]
    """by shard, the number of the last transition in the journal, read before the ledgers"""
    after: dict[int, int]
    """by shard, the number of the last transition in the journal, read after the ledgers"""
    ledgers: dict[str, dict[str, int]]
    low: dict[str, dict[str, int]] = {}
    """by key and counter, the count in the journal up to ``before``"""
    high: dict[str, dict[str, int]] = {}
    """by key and counter, the count in the journal up to ``after``"""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's ledger at one time, with bounds for the journal's counts at that time."""

    runs: dict[int, str]
    ledger: dict[str, int]
    low: dict[str, int]
    high: dict[str, int]


class ServiceState(msgspec.Struct, kw_only=True):
    """The state of the service after a batch."""

    version: int = VERSION
    queries: dict[str, int] = {}
    """number of the last batch, by query; a lost checkpoint leads to a second query"""
    open: str = ""
    """name of the folder with the live tasks"""
    transitions: int = 0
    damaged: int = 0
    frontier: float = 0.0
    """latest Unix time of the transitions that were read, limited to about the current time"""
    positions: dict[str, Position] = {}
    """how far each run was read, by ``run/shard``"""
    offsets: dict[str, int] = {}
    """end of the last batch, by ``run/name`` of a shard, if the source has such offsets"""
    books: dict[str, QueueCounts] = {}
    windows: dict[str, dict[int, WindowCounts]] = {}
    """the latest windows, by key and start"""
    gaps: list[Gap] = []
    """the latest gaps"""
    horizon: int = 0
    """Unix time before which windows are closed: they no longer change"""
    late: int = 0
    """number of transitions that arrived after their windows were closed: they are in the archive, but in no window"""
    rises: list[FailureTrend] = []
    """the latest episodes of rising failures"""
    checked: int = msgspec.field(default=0, name="judged")
    """start (Unix seconds) of the last window that was checked for rising failures"""
    probe: Probe | None = None
    baselines: dict[str, Baseline] = {}
    differing: dict[str, str] = {}
    """by key, how the ledger of the store differs from the journal"""

    def current(self) -> dict[int, list[str]]:
        """Return the runs of each shard that may continue: no other run began after their last transition.

        A store that was emptied and a process that was restarted begin a new run, and the live tasks of the former run
        are gone.
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
        """Return how far a run of a shard has been read; ``None`` if none of it has been read."""
        return self.positions.get(f"{run}/{shard}")


def load(path: Path) -> ServiceState:
    """Return the saved state, or an empty state if no file exists. Raises `ConfigurationError` for an invalid file."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=ServiceState)
    except FileNotFoundError:
        return ServiceState()
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{path}: not a state file of the streaming service; restore it from a backup"
        ) from error
    if state.version != VERSION:
        raise ConfigurationError(
            f"{path}: written by another version of the streaming service (got version {state.version}; allowed: "
            f"{VERSION}); use that version of this package, or another folder"
        )
    return state


def save(path: Path, state: ServiceState) -> None:
    """Replace the saved state by one rename, so that it survives a crash."""
    replace_file(path, msgspec.json.encode(state))
