"""The history of a run, grouped by task, as the checker's rules read it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from tests.chaos.history import Event, What

LIVE = frozenset({"blocked", "waiting", "scheduled", "in_flight"})
STATES = LIVE | {"done", "dead", "expired", "cancelled", "discarded"}
_INF = float("inf")
_NOT_STORED = frozenset({"refused", "unavailable", "conflict"})
_STORED = frozenset({"accepted", "duplicate"})


class Known(msgspec.Struct, frozen=True):
    """The final state of one task in the store."""

    state: str
    attempt: int = 1
    losses: int = 0


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """The final state of the store."""

    tasks: dict[str, dict[str, Known | None]] = {}
    """by key and id; contains every id that any process tried to publish, with None for unknown ones"""
    ledgers: dict[str, dict[str, int]] = {}
    """counters by queue key: published, and one per state"""
    dead_letters: dict[str, tuple[str, ...]] = {}
    slots: dict[str, str] = {}
    """token of the holder of each slot, empty if it is free"""

    def known(self, key: str, task: str) -> Known | None:
        """Return the final state of a task; None if the store does not know it."""
        return self.tasks.get(key, {}).get(task)


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What was agreed for a run: time limits, and what a fault may excuse."""

    lease: float = 6.0
    """lease in seconds; a consumer that is silent for less keeps its deliveries"""
    liveness: float = 30.0
    """maximum seconds from the last fault until every task has ended"""
    strict_order: bool = False
    """whether the order of first deliveries is checked even across receives that failed"""
    waived: tuple[tuple[float, float], ...] = ()
    """spans of a failover: publishes and settlements answered within them may be lost with the old master"""
    may_lose_publishes: bool = False
    """whether publishes answered within a waived span may be lost too (durability below ``replicated``)"""
    total_slots: int | None = None

    def waives(self, *times: float) -> bool:
        """Return whether one of these times is in a waived span."""
        return any(start <= time <= end for start, end in self.waived for time in times)


class Violation(msgspec.Struct, frozen=True):
    """One violation of a rule."""

    rule: str
    text: str
    task: str = ""
    waived: bool = False

    def __str__(self) -> str:
        """Return the violation as one line of text."""
        return f"{self.rule}{' (waived)' if self.waived else ''} {self.task}: {self.text}"


class Publication(msgspec.Struct, frozen=True):
    """One call to publish a task, and its answer."""

    called: Event
    answered: Event | None

    @property
    def outcome(self) -> str:
        """The answer; ``unconfirmed`` if there was none."""
        return self.answered.outcome if self.answered else "unconfirmed"

    @property
    def stored(self) -> bool:
        """Whether the answer says that the store has the task."""
        return self.outcome in _STORED

    @property
    def maybe(self) -> bool:
        """Whether the store may have stored the task."""
        return self.outcome not in _NOT_STORED


class Settlement(msgspec.Struct, frozen=True):
    """One call to settle a receipt, and its answer."""

    called: Event
    answered: Event | None

    @property
    def verb(self) -> str:
        """Kind of the settlement, for example ``ack``."""
        return self.called.verb

    @property
    def outcome(self) -> str:
        """The answer; ``unknown`` if there was none."""
        return self.answered.outcome if self.answered else "unknown"

    @property
    def times(self) -> tuple[float, ...]:
        """Time of the call and, if it was answered, of the answer."""
        return (self.called.at, *((self.answered.at,) if self.answered else ()))

    @property
    def ok(self) -> bool:
        """Whether this call or an earlier one certainly took effect."""
        return self.outcome in {"ok", "dead"}

    @property
    def ends(self) -> bool:
        """Whether the settlement certainly ended the task."""
        return (self.ok and self.verb in {"ack", "dead_letter"}) or self.outcome == "dead"


class Handout(msgspec.Struct):
    """One delivery of a task, identified by its receipt, as the consumer saw it."""

    first: Event
    settlements: list[Settlement]
    holders: list[tuple[float, str]]
    """names of the consumers that held it, each with the time since when; several if it was adopted"""

    @property
    def store_at(self) -> float:
        """Time of the delivery by the store's clock."""
        return self.first.store_at or 0.0

    @property
    def order(self) -> tuple[float, float]:
        """Sort key for the deliveries of a task."""
        return self.store_at, self.first.at

    @property
    def settled_at(self) -> float:
        """Time at which its first settlement was called; infinity if there was none."""
        return min((one.called.at for one in self.settlements), default=_INF)

    @property
    def answered_at(self) -> float:
        """Time of the first definite answer to a settlement; infinity if there was none."""
        return min(
            (
                one.answered.at
                for one in self.settlements
                if one.answered and one.outcome != "unknown"
            ),
            default=_INF,
        )


class Story(msgspec.Struct):
    """All that is known about one task."""

    key: str
    task: str
    publications: list[Publication]
    handouts: list[Handout]
    stray: list[Settlement]
    """settlements with receipts that were never issued for this task"""
    operators: list[Event]
    """calls of operators that name the task"""

    @property
    def name(self) -> str:
        """Queue key and task id, separated by a slash."""
        return f"{self.key}/{self.task}"

    @property
    def priority(self) -> int:
        """The task's priority."""
        return self.publications[0].called.priority if self.publications else 5

    @property
    def tenant(self) -> str:
        """The task's tenant; empty if it has none."""
        return self.publications[0].called.tenant if self.publications else ""

    @property
    def ordering_key(self) -> str:
        """The task's ordering key; empty if it has none."""
        return self.publications[0].called.ordering_key if self.publications else ""

    @property
    def scheduled(self) -> bool:
        """Whether the task was published with a time before which it must not be delivered."""
        return any(one.called.not_before is not None for one in self.publications)

    @property
    def stored(self) -> bool:
        """Whether the store confirmed the task."""
        return any(one.stored for one in self.publications) or self._retried

    @property
    def maybe(self) -> bool:
        """Whether the store may have the task."""
        return any(one.maybe for one in self.publications) or self._retried

    @property
    def _retried(self) -> bool:
        return any(event.what is What.RETRY for event in self.operators)

    @property
    def settlements(self) -> list[tuple[Handout, Settlement]]:
        """All settlements of known deliveries of the task."""
        return [(handout, one) for handout in self.handouts for one in handout.settlements]


class History:
    """The merged events of a run, indexed by kind, task and receipt."""

    def __init__(self, events: Iterable[Event]) -> None:
        """Index the events, which need not be sorted."""
        self.events = sorted(events, key=lambda event: event.at)
        self.stories: dict[tuple[str, str], Story] = {}
        self.handouts: dict[str, Handout] = {}
        self._by_what: defaultdict[What, list[Event]] = defaultdict(list)
        for event in self.events:
            self._by_what[event.what].append(event)
        self._publications()
        self._deliveries()
        self._settlements()
        for event in self.of(What.RETRY, What.REDRIVE, What.DISCARD, What.CANCEL):
            if event.task:
                self._story(event).operators.append(event)
        for story in self.stories.values():
            story.handouts.sort(key=lambda handout: handout.order)

    def of(self, *whats: What) -> Sequence[Event]:
        """Return the events of these kinds, ordered by time."""
        if len(whats) == 1:
            return self._by_what[whats[0]]
        return sorted((e for what in whats for e in self._by_what[what]), key=lambda e: e.at)

    def revived(self, story: Story, start: float, end: float) -> bool:
        """Return whether an operator may have revived the task between two times."""
        calls = [*story.operators, *(e for e in self._sweeping if e.key == story.key)]
        return any(
            event.what in {What.RETRY, What.REDRIVE} and start <= event.at <= end for event in calls
        )

    @cached_property
    def _sweeping(self) -> list[Event]:
        return [e for e in self.of(What.REDRIVE, What.DISCARD, What.PURGE) if not e.task]

    @cached_property
    def wall(self) -> float:
        """Difference between the store's clock and the monotonic clock, in seconds."""
        offsets = [e.wall for e in self.of(What.STARTED) if e.wall is not None]
        return sorted(offsets)[len(offsets) // 2] if offsets else 0.0

    def issued(self, delivered: Event) -> float:
        """Return when the store made a delivery, on the monotonic clock."""
        return min(delivered.at, (delivered.store_at or _INF) - self.wall)

    @cached_property
    def harm(self) -> Mapping[str, list[tuple[float, float]]]:
        """Spans in which each process was dead, frozen or cut off, by its name."""
        spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        ends = {What.FROZEN: What.THAWED, What.CUT: What.MENDED}
        for event in self.of(What.KILLED):
            spans[event.target].append((event.at, _INF))
        for start, end in ends.items():
            over = [(e.target, e.at) for e in self.of(end)]
            for event in self.of(start):
                after = (at for name, at in over if name == event.target and at >= event.at)
                spans[event.target].append((event.at, min(after, default=_INF)))
        return spans

    def harmed(self, by: str, start: float, end: float, *, for_at_least: float = 0.0) -> bool:
        """Return whether a process was out of action between two times, in a span of at least this many seconds."""
        return any(
            begin <= end and over >= start and over - begin >= for_at_least
            for begin, over in self.harm.get(by, ())
        )

    @cached_property
    def _blind(self) -> list[float]:
        # A call that was given up may still be carried out after the obstacle is gone, so both ends of a fault count.
        signs = (What.BLIND, What.KILLED, What.FROZEN, What.THAWED, What.CUT, What.MENDED)
        events = [*self.of(*signs), *self.of(What.CLOSE)]
        events += [e for e in self.of(What.HEALED) if e.target.startswith("redis")]
        return sorted(event.at for event in events)

    def blind(self, start: float, end: float) -> bool:
        """Return whether there may have been deliveries between two times that no process saw."""
        at = bisect_left(self._blind, start)
        return at < len(self._blind) and self._blind[at] <= end

    def setting(self, name: str) -> dict[str, list[Event]]:
        """Return the changes of a setting, by queue key."""
        found: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self.of(What.SETTINGS):
            if event.name == name:
                found[event.key].append(event)
        return found

    def _story(self, event: Event) -> Story:
        name = event.key, event.task
        story = self.stories.get(name)
        if story is None:
            story = self.stories[name] = Story(*name, [], [], [], [])
        return story

    def _pair(self, call: What, answer: What) -> list[tuple[Event, Event | None]]:
        answers = {(e.by, e.call, e.task, e.receipt): e for e in self.of(answer)}
        return [
            (event, answers.get((event.by, event.call, event.task, event.receipt)))
            for event in self.of(call)
        ]

    def _publications(self) -> None:
        for called, answered in self._pair(What.PUBLISH, What.PUBLISHED):
            self._story(called).publications.append(Publication(called, answered))

    def _deliveries(self) -> None:
        for event in self.of(What.DELIVERED):
            known = self.handouts.get(event.receipt)
            if known is None or (known.first.key, known.first.task) != (event.key, event.task):
                # The delivery belongs to its consumer from the store's time on, even if a frozen consumer saw it much
                # later.
                handout = Handout(event, [], [(self.issued(event), event.by)])
                self.handouts.setdefault(event.receipt, handout)
                self._story(event).handouts.append(handout)
        for event in self.of(What.ADOPTED):
            handout = self.handouts.setdefault(event.receipt, Handout(event, [], []))
            if handout.first is event:
                self._story(event).handouts.append(handout)
            handout.holders.append((event.at, event.by))

    def _settlements(self) -> None:
        for called, answered in self._pair(What.SETTLE, What.SETTLED):
            settlement = Settlement(called, answered)
            handout = self.handouts.get(called.receipt)
            if handout is None or handout.first.task != called.task:
                self._story(called).stray.append(settlement)
            else:
                handout.settlements.append(settlement)
