"""What the streaming service knows after a batch: one file, replaced whole, which is what commits the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.pipeline.tables import replace_file

VERSION = 1
LIVE = ("waiting", "scheduled", "in_flight", "dead")
"""states of a task that its store still has"""
ENDS = ("done", "expired", "cancelled", "discarded")


class Position(msgspec.Struct, kw_only=True):
    """How far a count of transitions was read."""

    last: int
    """the highest number there was"""
    missing: int = 0
    """numbers below it that never came"""
    since: float
    """when the first transition was that was read"""
    until: float


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """A break in a journal."""

    kind: Literal["missing", "reset", "back"]
    """transitions that are not there; another count where one was being read, as the store began anew; or numbers that
    were given a second time, as the store came back without its latest transitions"""
    shard: int
    run: str
    first: int
    last: int
    """between these, both included"""
    number: int
    """of transitions that are missing, or whose numbers were given again; of tasks that are gone"""
    at: float


class ServiceBooks(msgspec.Struct, kw_only=True):
    """What the journal told of a queue, in tasks; a task that lives again counts again."""

    published: int = 0
    adopted: int = 0
    """whose beginning the journal does not have, or that ended when they had ended before"""
    doubled: int = 0
    """published when they were there"""
    expired: int = 0
    """that were live when their store was reset"""
    ended: dict[str, int] = {}
    live: dict[str, int] = {}
    events: dict[str, int] = {}
    whole: bool = True
    """whether the journal has this queue from its first task on"""

    @property
    def imbalance(self) -> int:
        """Published minus all that is accounted for."""
        return self.published - sum(self.ended.values()) - sum(self.live.values()) - self.expired

    @property
    def balanced(self) -> bool | None:
        """Whether every task is accounted for; ``None`` where the journal cannot tell."""
        if not self.whole:
            return None
        return not (self.imbalance or self.adopted or self.doubled)


class WindowCounts(msgspec.Struct, kw_only=True):
    """What happened to a queue in some seconds."""

    events: dict[str, int] = {}
    waits: dict[int, int] = {}
    """how many tasks waited how long, by the classes of `windows.seconds_of`"""
    runs: dict[int, int] = {}


class FailureTrend(msgspec.Struct, kw_only=True):
    """A time in which more executions of a queue failed than before."""

    key: str
    window: int
    """the first one"""
    share: float
    usual: float
    """the share of the windows before"""
    executions: int
    over: bool = False


class Probe(msgspec.Struct, kw_only=True):
    """The ledgers at a moment, which the journal has not been read up to."""

    runs: dict[int, str]
    """by shard"""
    names: dict[int, str]
    """of shards, as the source has them"""
    before: dict[int, int]
    """by shard, the last number before the ledgers were read"""
    after: dict[int, int]
    ledgers: dict[str, dict[str, int]]
    low: dict[str, dict[str, int]] = {}
    """by key and counter, what the journal told up to ``before``"""
    high: dict[str, dict[str, int]] = {}


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's ledger, and between what the journal's counts were at that moment."""

    runs: dict[int, str]
    ledger: dict[str, int]
    low: dict[str, int]
    high: dict[str, int]


class ServiceState(msgspec.Struct, kw_only=True):
    """What is known after a batch."""

    version: int = VERSION
    queries: dict[str, int] = {}
    """by query, its last batch; there is a second one where a checkpoint was lost"""
    open: str = ""
    """the folder of the tasks that live"""
    transitions: int = 0
    damaged: int = 0
    frontier: float = 0.0
    """when the last transition was that was read, but for times that are yet to come"""
    positions: dict[str, Position] = {}
    """by ``run/shard``"""
    offsets: dict[str, int] = {}
    """by ``run/name``, where the last batch ended, as far as the source's offsets tell"""
    books: dict[str, ServiceBooks] = {}
    windows: dict[str, dict[int, WindowCounts]] = {}
    """by key and start, the latest ones"""
    gaps: list[Gap] = []
    """the latest ones"""
    horizon: int = 0
    """windows that began before are closed"""
    late: int = 0
    """transitions of windows that were closed: they are in the archive and in no window"""
    rises: list[FailureTrend] = []
    """the latest ones"""
    judged: int = 0
    """the last window that was looked at for such"""
    probe: Probe | None = None
    baselines: dict[str, Baseline] = {}
    differing: dict[str, str] = {}
    """by key, how the live ledger differs from the journal"""

    def current(self) -> dict[int, list[str]]:
        """Return by shard the counts that may go on: none began after they were last heard of.

        A store that was emptied and a process that was started anew begin another count, and what lived in the
        former is gone.
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
        """Return how far a count was read."""
        return self.positions.get(f"{run}/{shard}")


def load(path: Path) -> ServiceState:
    """Return what was saved, or what is known at the beginning. Raises `ConfigurationError` if it is not ours."""
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
