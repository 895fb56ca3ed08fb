"""The model's state of one partition (a record per task, counters, consumers), and the steps that scripts are made of.

Names are those of the Lua scripts; each step states in a few lines what the function of that name must do. The model
ignores how Redis stores the data: it has no streams, pending lists or indexes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Self

from tests.model.terms import Flow, Terms

Name = tuple[str, str]
"""queue key and task id"""

OVER = frozenset({"done", "expired", "cancelled", "discarded", "replaced"})
LIVE = frozenset({"waiting", "scheduled", "blocked"})
LEDGER = (
    "published", "waiting", "in_flight", "scheduled", "blocked", "done", "dead", "expired", "cancelled", "discarded",
)  # fmt: skip


class Held(NamedTuple):
    """The unique key of a task."""

    key: str
    started: bool = False
    """whether the task gives the key back when it is delivered for the first time"""
    till: int = 0
    """time until which the task holds the key in any case"""
    first: int = 0
    """time of the publish that stored the task"""


class Record(NamedTuple):
    """The stored state of one task."""

    digest: str = ""
    priority: int = 5
    state: str = "waiting"
    place: str = ""
    """position of its entry: ``fresh`` = in its lane or delivered from there for the first time; ``parked`` = returned
    or scheduled; ``again`` = delivered after a return"""
    attempt: int = 1
    losses: int = 0
    prior: int = 0
    handed: int = 0
    """number of the attempt that was delivered last"""
    seq: int = 0
    """sequence number from when it became available; it determines the order within its lane"""
    fence: int = 0
    """unique number of its present entry; each delivery has its own"""
    owner: str = ""
    """token of the consumer that has the task in flight"""
    token: str = ""
    """token in the receipt of the delivery; it does not change when another consumer adopts the delivery"""
    due: int = 0
    """time at which a scheduled task is due; for a dead letter, its position in the list of dead letters"""
    deadline: int = 0
    at: int = 0
    """time of the last change"""
    verb: str = ""
    told: str = ""
    settled: int = 0
    """fence of the last settled delivery; ``verb`` and ``told`` are that settlement and its answer"""
    retries: frozenset[tuple[str, int]] = frozenset()
    """tokens of the last retries, each with the attempt that preceded it"""
    unique: Held | None = None
    instead: str = ""
    """id of the task that has got the contents of this one, in the state ``replaced``: this is no task"""
    parent: bool = False
    """whether other tasks wait for it"""
    batch: str = ""
    """the batch that it is a member of"""
    tenant: str = ""
    tags: tuple[str, ...] = ()
    indexed: frozenset[str] = frozenset()
    """those of its tags by which it is found"""
    published: int = 0
    """position among the tasks with a tag; it does not change"""
    worker: str = ""
    """worker of the delivery that made the task a dead letter, or of an ended task whose queue keeps ended tasks"""

    @property
    def live(self) -> bool:
        """Whether the task is waiting, scheduled, blocked or in flight."""
        return self.state in LIVE

    @property
    def open(self) -> bool:
        """Whether a receive may deliver the task."""
        return self.state == "waiting" and not self.owner and bool(self.place)

    @property
    def fresh(self) -> bool:
        """Whether the task was never delivered. Such tasks count against the queue's capacity."""
        return self.attempt == 1 and self.handed == 0

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Sort key among deliverable tasks: by priority, returned tasks first, then by when they became available."""
        return -self.priority, self.place == "fresh", self.seq

    @property
    def lane(self) -> str:
        """Name of the lane in the task's receipt."""
        return f"{'s' if self.place == 'fresh' else 'r'}{self.priority}"

    @property
    def more(self) -> str:
        """What the task's entry contains besides its id and its payload."""
        if self.fresh and not self.deadline:
            return ""
        return f"{self.attempt}:{self.losses}:{self.prior}:{self.deadline or ''}"


class Consumer(NamedTuple):
    """One subscription of a worker, from its start to its end."""

    worker: str
    keys: tuple[str, ...]
    turn: int = 0
    beat: int = 0


BYTES = 4_194_304
"""number of bytes of bodies after which a script ends its work"""


class Books:
    """The state of a partition. ``now`` is the store's time in microseconds."""

    def __init__(self) -> None:
        self.now = 0
        self.real = 0
        """time used for leases; it stays the real time if a test passes another ``now`` to the scripts"""
        self.tasks: dict[Name, Record] = {}
        self.open: dict[str, frozenset[str]] = {}
        """ids of tasks that a receive may deliver, by queue key"""
        self.later: dict[str, frozenset[str]] = {}
        """ids of scheduled tasks, by queue key"""
        self.counts: dict[tuple[str, str], int] = {}
        self.last: dict[str, int] = {}
        self.consumers: dict[str, Consumer] = {}
        self.terms: dict[str, Terms] = {}
        self.read = 0
        """size of the bodies that the current call has read or written so far"""
        self.promoted = 0
        """number of due tasks that the current call has processed so far"""
        self.purging: dict[str, tuple[int, int]] = {}
        """by queue key, the highest sequence number that a purge in progress ends, and the time of its last call"""
        self.purged: dict[str, int] = {}
        """by queue key, how many scheduled tasks were cancelled between two calls of a purge"""

    def clone(self) -> Self:
        """Return an independent copy."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.tasks, copy.open, copy.later = dict(self.tasks), dict(self.open), dict(self.later)
        copy.counts, copy.last = dict(self.counts), dict(self.last)
        copy.consumers, copy.terms = dict(self.consumers), dict(self.terms)
        return copy

    @property
    def sated(self) -> bool:
        """Whether the current call has processed so many bytes that it ends its work."""
        return self.read >= BYTES

    def size(self, name: Name) -> int:  # noqa: ARG002 - for the subclass that knows bodies
        """Return the size of a task's body. Zero here: the bodies of the small models never fill a call."""
        return 0

    def count(self, key: str, counter: str) -> int:
        """Return a counter of a queue."""
        return self.counts.get((key, counter), 0)

    def terms_of(self, key: str) -> Terms:
        """Return the settings of a queue."""
        return self.terms.get(key, Terms())

    def of(self, key: str) -> Iterator[tuple[Name, Record]]:
        """Iterate over the names and records of all tasks of a queue."""
        return ((name, record) for name, record in self.tasks.items() if name[0] == key)

    def due(self, key: str) -> float:
        """Return when the next scheduled task of a queue is due; infinity if there is none."""
        return min((self.tasks[key, one].due for one in self.later.get(key, ())), default=math.inf)

    def first_due(self) -> float:
        """Return when the next scheduled task of any queue is due; infinity if there is none."""
        return min(map(self.due, self.later), default=math.inf)

    def add(self, key: str, counter: str, n: int) -> None:
        """Add ``n`` to a counter of a queue."""
        self.counts[key, counter] = self.counts.get((key, counter), 0) + n

    def put(self, name: Name, record: Record) -> None:
        """Store a task's record and update the indexes of available and scheduled ids."""
        key, task = name
        self.tasks[name] = record
        for index, belongs in (
            (self.open, record.open),
            (self.later, record.state == "scheduled"),
        ):
            ids = index.get(key, frozenset())
            if belongs != (task in ids):
                index[key] = ids ^ {task}

    def next_seq(self, key: str) -> int:
        """Return a sequence number greater than all earlier ones of the queue."""
        self.last[key] = max(self.last.get(key, 0) + 1, self.now)
        return self.last[key]

    def make_available(self, name: Name, r: Record) -> None:
        """Put a task at the end of its lane."""
        seq = self.next_seq(name[0])
        self.put(
            name, r._replace(state="waiting", place="fresh", seq=seq, fence=seq, due=0, at=self.now)
        )
        self.add(name[0], "waiting", 1)

    def put_back(self, name: Name, r: Record) -> None:
        """Return a task to the position in its lane that it had before its delivery."""
        self.put(
            name,
            r._replace(state="waiting", place="parked", fence=0, owner="", token="", at=self.now),
        )
        self.add(name[0], "waiting", 1)

    def schedule(self, name: Name, r: Record, at: int) -> None:
        """Schedule a task for a time."""
        seq = self.next_seq(name[0])
        changed = r._replace(
            state="scheduled",
            place="parked",
            seq=seq,
            fence=0,
            owner="",
            token="",
            due=at,
            at=self.now,
        )
        self.put(name, changed)
        self.add(name[0], "scheduled", 1)

    def settle(self) -> None:
        """Do what a call does at its end. Nothing here: in the small models no task waits for others."""

    def promote(self, key: str, limit: int = 1000) -> int:
        """Make due tasks available, ordered by due time, or cancel them if a purge is in progress.

        Return how many became available. Fewer than ``limit`` are processed if their bodies are large.
        """
        late = [one for one in self.later.get(key, ()) if self.tasks[key, one].due <= self.now]
        late.sort(key=lambda one: (self.tasks[key, one].due, self.tasks[key, one].seq))
        upto, at = self.purging.get(key, (0, 0))
        available = 0
        for task in late[:limit]:
            if self.sated:
                break
            name, r = (key, task), self.tasks[key, task]
            self.promoted += 1
            if r.seq <= upto and self.now < at + 60_000_000:
                self.end_live(name, r, "cancelled")
                self.purged = self.purged | {key: self.purged.get(key, 0) + 1}
            else:
                self.read += self.size(name)
                self.add(key, "scheduled", -1)
                self.make_available(name, r)
                available += 1
        return available

    def promote_due(self, limit: int = 1000) -> int:
        """Make due tasks of all queues available; return their number."""
        available, before = 0, self.promoted
        for key in sorted(self.later, key=lambda key: (self.due(key), key)):
            available += self.promote(key, limit - (self.promoted - before))
        return available

    def withdraw(self, name: Name, r: Record) -> Record:
        """Remove a live task from its present state and counters; the record keeps its owner, if any."""
        where = r.state if r.state != "waiting" else "in_flight" if r.owner else "waiting"
        self.add(name[0], where, -1)
        if r.owner:
            r = r._replace(handed=r.attempt)
        elif r.fresh:
            self.add(name[0], "fresh", -1)
        return r._replace(place="", fence=0)

    def remember(self, name: Name, state: str) -> None:
        """Note that a task has just ended. Nothing is to be done here: the small models forget nothing."""

    def worker_of(self, token: str) -> str:
        """Return the worker of a consumer; empty for none."""
        consumer = self.consumers.get(token)
        return consumer.worker if consumer else ""

    def finish(self, name: Name, r: Record, state: str) -> None:
        """End a withdrawn task in the given final state."""
        self.remember(name, state)
        worker = self.worker_of(r.owner) or r.worker if self.terms_of(name[0]).keep else ""
        self.put(
            name,
            r._replace(
                state=state,
                place="",
                fence=0,
                owner="",
                token="",
                due=0,
                deadline=0,
                at=self.now,
                worker=worker,
            ),
        )
        self.add(name[0], state, 1)

    def end_live(self, name: Name, r: Record, state: str) -> None:
        """End a live task in the given final state."""
        self.finish(name, self.withdraw(name, r), state)

    def bury(self, name: Name, r: Record) -> None:
        """Put a task at the end of the dead letters."""
        place = self.next_seq(name[0])
        self.put(
            name,
            r._replace(
                state="dead",
                place="",
                fence=0,
                owner="",
                token="",
                due=place,
                at=self.now,
                worker=self.worker_of(r.owner),
            ),
        )
        self.add(name[0], "dead", 1)

    def hand_back(self, name: Name, r: Record, verb: str, *, lost: bool) -> bool:
        """Take a delivery back. Return True if it was lost too often and the task is now a dead letter."""
        key = name[0]
        self.read += self.size(name)
        self.add(key, "in_flight", -1)
        self.add(key, "redelivered", 1)
        r = r._replace(handed=r.attempt)
        if verb:
            r = r._replace(verb=verb, told="ok", settled=r.fence)
        if lost:
            self.add(key, "lost", 1)
            r = r._replace(losses=r.losses + 1)
            if r.losses > self.terms_of(key).max_losses:
                self.bury(name, r._replace(told="dead") if verb else r)
                return True
        self.put_back(name, r)
        return False

    def refusal(self, key: str) -> str:
        """Return the reason why a queue refuses new tasks; empty if it accepts them."""
        flow = self.terms_of(key).flow
        if flow.intake_paused:
            return "intake_paused"
        fresh = self.count(key, "fresh")
        return f"capacity:{fresh}:{flow.capacity:.0f}" if 0 < flow.capacity <= fresh else ""

    def refilled(self, key: str) -> Flow:
        """Return the queue's limits with the rate limit tokens available now."""
        flow = self.terms_of(key).flow
        if flow.max_tokens <= 0 or self.now <= flow.at:
            return flow
        come = (self.now - flow.at) * flow.max_tokens / flow.period
        return flow._replace(tokens=min(flow.max_tokens, flow.tokens + come), at=self.now)

    def room(self, key: str, flow: Flow) -> tuple[float, int]:
        """Return how many tasks may be delivered now, and when time alone changes that (0 for never)."""
        places = math.inf
        if flow.max_inflight > 0:
            places = max(0, flow.max_inflight - self.count(key, "in_flight"))
        if flow.paused:
            return 0, 0
        if flow.max_tokens == 0:
            return places, 0
        enough = 1 - 1e-6  # tolerance for floating point errors in the number of tokens
        if places == 0 or flow.tokens >= enough:
            return min(places, math.floor(flow.tokens + 1 - enough)), 0
        return 0, math.ceil(flow.at + (1 - flow.tokens) * flow.period / flow.max_tokens)
