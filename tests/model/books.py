"""What the model keeps of one partition: a record per task, counters, consumers; and the steps of scripts.

The names are those of the Lua scripts, and each step says in a few lines what its namesake must do. Nothing here
knows how Redis stores it: streams, pending lists and indexes are what the model is free of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Self

Name = tuple[str, str]
"""key and id"""

OVER = frozenset({"done", "expired", "cancelled", "discarded"})
LIVE = frozenset({"waiting", "scheduled"})
LEDGER = (
    "published", "waiting", "in_flight", "scheduled", "done", "dead", "expired", "cancelled", "discarded",
)  # fmt: skip


class Record(NamedTuple):
    """One task."""

    digest: str = ""
    priority: int = 5
    state: str = "waiting"
    place: str = ""
    """``fresh``: at the end of its lane, or handed out from there; ``parked``: returned, or scheduled; ``again``:
    handed out after a return"""
    attempt: int = 1
    losses: int = 0
    prior: int = 0
    handed: int = 0
    """the attempt that was handed out last"""
    seq: int = 0
    """when it became available: its place in its lane"""
    fence: int = 0
    """of its entry; a delivery has one that no other has"""
    owner: str = ""
    """the consumer that has it in flight"""
    token: str = ""
    """of its receipt, which an heir leaves as it was"""
    due: int = 0
    """when it is due; the place among the dead of a dead one"""
    deadline: int = 0
    at: int = 0
    """when it last changed"""
    verb: str = ""
    told: str = ""
    settled: int = 0
    """how the last delivery was settled, what was answered, and the fence of it"""
    retries: frozenset[str] = frozenset()
    """tokens of the retries so far"""

    @property
    def live(self) -> bool:
        """Whether it waits, is scheduled or in flight."""
        return self.state in LIVE

    @property
    def open(self) -> bool:
        """Whether a receive may hand it out."""
        return self.state == "waiting" and not self.owner and bool(self.place)

    @property
    def fresh(self) -> bool:
        """Whether it was never handed out: it counts against the capacity until then."""
        return self.attempt == 1 and self.handed == 0

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Where it stands among what can be handed out: by priority, returned ones first, as they became available."""
        return -self.priority, self.place == "fresh", self.seq

    @property
    def lane(self) -> str:
        """The lane that its receipt names."""
        return f"{'s' if self.place == 'fresh' else 'r'}{self.priority}"

    @property
    def more(self) -> str:
        """What its entry says beside its id and its body."""
        if self.fresh and not self.deadline:
            return ""
        return f"{self.attempt}:{self.losses}:{self.prior}:{self.deadline or ''}"


class Consumer(NamedTuple):
    """One start of a consumer."""

    worker: str
    keys: tuple[str, ...]
    turn: int = 0
    beat: int = 0


class Flow(NamedTuple):
    """The limits of a queue, and what they have left."""

    capacity: float = 0
    max_inflight: float = 0
    max_tokens: float = 0
    period: float = 0
    paused: float = 0
    intake_paused: float = 0
    tokens: float = 0
    at: float = 0

    @property
    def limited(self) -> bool:
        """Whether there is any."""
        return any(self[:6])


class Terms(NamedTuple):
    """The settings of a queue that the books need."""

    window: int = 300_000_000
    max_losses: int = 5
    result_ttl: int = 3_600_000_000
    replicas: int = 0
    flow: Flow = Flow()


class Books:
    """The state of a partition at one instant, ``now`` in microseconds of the store."""

    def __init__(self) -> None:
        self.now = 0
        self.real = 0
        """the time that leases count by, also where a test passes another"""
        self.tasks: dict[Name, Record] = {}
        self.open: dict[str, frozenset[str]] = {}
        """ids that a receive may hand out, by key"""
        self.later: dict[str, frozenset[str]] = {}
        """ids that are scheduled, by key"""
        self.counts: dict[tuple[str, str], int] = {}
        self.last: dict[str, int] = {}
        self.consumers: dict[str, Consumer] = {}
        self.terms: dict[str, Terms] = {}

    def clone(self) -> Self:
        """Return a copy that changes by itself."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.tasks, copy.open, copy.later = dict(self.tasks), dict(self.open), dict(self.later)
        copy.counts, copy.last = dict(self.counts), dict(self.last)
        copy.consumers, copy.terms = dict(self.consumers), dict(self.terms)
        return copy

    # Reading

    def count(self, key: str, counter: str) -> int:
        """Return a counter of a queue."""
        return self.counts.get((key, counter), 0)

    def terms_of(self, key: str) -> Terms:
        """Return the settings of a queue."""
        return self.terms.get(key, Terms())

    def of(self, key: str) -> Iterator[tuple[Name, Record]]:
        """Walk over the tasks of a queue."""
        return ((name, record) for name, record in self.tasks.items() if name[0] == key)

    def due(self, key: str) -> float:
        """Return when the next scheduled task of a queue is due."""
        return min((self.tasks[key, one].due for one in self.later.get(key, ())), default=math.inf)

    def first_due(self) -> float:
        """Return when the next scheduled task of all is due."""
        return min(map(self.due, self.later), default=math.inf)

    # Writing

    def add(self, key: str, counter: str, n: int) -> None:
        """Count."""
        self.counts[key, counter] = self.counts.get((key, counter), 0) + n

    def put(self, name: Name, record: Record) -> None:
        """Write a record."""
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
        """Return a number that is above all that the queue has had."""
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
        """Put a task where it was in its lane."""
        self.put(
            name,
            r._replace(state="waiting", place="parked", fence=0, owner="", token="", at=self.now),
        )
        self.add(name[0], "waiting", 1)

    def schedule(self, name: Name, r: Record, at: int) -> None:
        """Make a task available at a time."""
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

    def promote(self, key: str, limit: int = 1000) -> int:
        """Make available what has fallen due, in the order of its times; answer how many."""
        late = [one for one in self.later.get(key, ()) if self.tasks[key, one].due <= self.now]
        late.sort(key=lambda one: (self.tasks[key, one].due, self.tasks[key, one].seq))
        for task in late[:limit]:
            self.add(key, "scheduled", -1)
            self.make_available((key, task), self.tasks[key, task])
        return len(late[:limit])

    def withdraw(self, name: Name, r: Record) -> Record:
        """Take a live task from where it is; its owner, if any, stays named."""
        where = "scheduled" if r.state == "scheduled" else "in_flight" if r.owner else "waiting"
        self.add(name[0], where, -1)
        if r.owner:
            r = r._replace(handed=r.attempt)
        elif r.fresh:
            self.add(name[0], "fresh", -1)
        return r._replace(place="", fence=0)

    def finish(self, name: Name, r: Record, state: str) -> None:
        """End a task that was taken from where it was."""
        self.put(
            name,
            r._replace(
                state=state, place="", fence=0, owner="", token="", due=0, deadline=0, at=self.now
            ),
        )
        self.add(name[0], state, 1)

    def end_live(self, name: Name, r: Record, state: str) -> None:
        """End a live task, wherever it is."""
        self.finish(name, self.withdraw(name, r), state)

    def bury(self, name: Name, r: Record) -> None:
        """Put a task among the dead."""
        place = self.next_seq(name[0])
        self.put(
            name,
            r._replace(state="dead", place="", fence=0, owner="", token="", due=place, at=self.now),
        )
        self.add(name[0], "dead", 1)

    def hand_back(self, name: Name, r: Record, verb: str, *, lost: bool) -> bool:
        """Take a delivery back; answer whether it was lost once too often, and is dead."""
        key = name[0]
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

    # Limits

    def refusal(self, key: str) -> str:
        """Say why a task is not taken in; nothing where it is."""
        flow = self.terms_of(key).flow
        if flow.intake_paused:
            return "intake_paused"
        fresh = self.count(key, "fresh")
        return f"capacity:{fresh}:{flow.capacity:.0f}" if 0 < flow.capacity <= fresh else ""

    def refilled(self, key: str) -> Flow:
        """Return the limits with the tokens of this instant."""
        flow = self.terms_of(key).flow
        if flow.max_tokens <= 0 or self.now <= flow.at:
            return flow
        come = (self.now - flow.at) * flow.max_tokens / flow.period
        return flow._replace(tokens=min(flow.max_tokens, flow.tokens + come), at=self.now)

    def room(self, key: str, flow: Flow) -> tuple[float, int]:
        """Say how many may be handed out, and when that may change by time alone (0 for never)."""
        places = math.inf
        if flow.max_inflight > 0:
            places = max(0, flow.max_inflight - self.count(key, "in_flight"))
        if flow.paused:
            return 0, 0
        if flow.max_tokens == 0:
            return places, 0
        enough = 1 - 1e-6  # what floating point leaves out of a token is forgiven
        if places == 0 or flow.tokens >= enough:
            return min(places, math.floor(flow.tokens + 1 - enough)), 0
        return 0, math.ceil(flow.at + (1 - flow.tokens) * flow.period / flow.max_tokens)
