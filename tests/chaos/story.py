"""A history sorted by task: what the checker's rules look at."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from tests.chaos.history import Event, What

LIVE = frozenset({"waiting", "scheduled", "in_flight"})
STATES = LIVE | {"done", "dead", "expired", "cancelled", "discarded"}
_INF = float("inf")
_NOT_STORED = frozenset({"refused", "unavailable", "conflict"})
_STORED = frozenset({"accepted", "duplicate"})


class Known(msgspec.Struct, frozen=True):
    """What the store said of one task at the end."""

    state: str
    attempt: int = 1
    losses: int = 0


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """What the store said at the end."""

    tasks: dict[str, dict[str, Known | None]] = {}
    """by key and id; every id that anybody has tried to publish was asked for"""
    ledgers: dict[str, dict[str, int]] = {}
    """by key: published, and a count per state"""
    dead_letters: dict[str, tuple[str, ...]] = {}
    slots: dict[str, str] = {}
    """slot to its holder's token, empty if it is free"""

    def known(self, key: str, task: str) -> Known | None:
        """Return what is known of a task."""
        return self.tasks.get(key, {}).get(task)


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What was agreed for a run: bounds, and what a fault may excuse."""

    lease: float = 6.0
    """a consumer that is silent for less loses nothing"""
    liveness: float = 30.0
    """seconds after the last fault by which every task has ended"""
    strict_order: bool = False
    """the order of first deliveries holds even across receives that failed"""
    waived: tuple[tuple[float, float], ...] = ()
    """spans of a failover: settlements and publishes answered within may be lost with the old master"""
    may_lose_publishes: bool = False
    """whether publishes answered within a waived span may be lost, too (durability below ``replicated``)"""
    total_slots: int | None = None

    def waives(self, *times: float) -> bool:
        """Whether one of these times lies in a waived span."""
        return any(start <= time <= end for start, end in self.waived for time in times)


class Violation(msgspec.Struct, frozen=True):
    """One rule broken once."""

    rule: str
    text: str
    task: str = ""
    waived: bool = False

    def __str__(self) -> str:
        """Say all of it in one line."""
        return f"{self.rule}{' (waived)' if self.waived else ''} {self.task}: {self.text}"


class Publication(msgspec.Struct, frozen=True):
    """One call to publish a task."""

    called: Event
    answered: Event | None

    @property
    def outcome(self) -> str:
        """What was answered; ``unconfirmed`` if nothing was."""
        return self.answered.outcome if self.answered else "unconfirmed"

    @property
    def stored(self) -> bool:
        """Whether the store said that it has the task."""
        return self.outcome in _STORED

    @property
    def maybe(self) -> bool:
        """Whether the store may have taken the task."""
        return self.outcome not in _NOT_STORED


class Settlement(msgspec.Struct, frozen=True):
    """One call to settle a receipt."""

    called: Event
    answered: Event | None

    @property
    def verb(self) -> str:
        """Which verb."""
        return self.called.verb

    @property
    def outcome(self) -> str:
        """What was answered; ``unknown`` if nothing was."""
        return self.answered.outcome if self.answered else "unknown"

    @property
    def times(self) -> tuple[float, ...]:
        """When it was called, and answered if it was."""
        return (self.called.at, *((self.answered.at,) if self.answered else ()))

    @property
    def ok(self) -> bool:
        """Whether it surely took effect, now or before."""
        return self.outcome in {"ok", "dead"}

    @property
    def ends(self) -> bool:
        """Whether it surely ended the task."""
        return (self.ok and self.verb in {"ack", "dead_letter"}) or self.outcome == "dead"


class Handout(msgspec.Struct):
    """One receipt: one hand-out of one task, as the consumer saw it."""

    first: Event
    settlements: list[Settlement]
    holders: list[tuple[float, str]]
    """since when who holds it; more than one if it was adopted"""

    @property
    def store_at(self) -> float:
        """When, by the store's clock."""
        return self.first.store_at or 0.0

    @property
    def order(self) -> tuple[float, float]:
        """Sorts the hand-outs of a task."""
        return self.store_at, self.first.at

    @property
    def settled_at(self) -> float:
        """When its first settlement was called; infinity if none was."""
        return min((one.called.at for one in self.settlements), default=_INF)

    @property
    def answered_at(self) -> float:
        """When a settlement was first answered, one way or the other; infinity if none was."""
        return min(
            (
                one.answered.at
                for one in self.settlements
                if one.answered and one.outcome != "unknown"
            ),
            default=_INF,
        )


class Story(msgspec.Struct):
    """Everything about one task."""

    key: str
    task: str
    publications: list[Publication]
    handouts: list[Handout]
    stray: list[Settlement]
    """settlements of receipts that nobody was given for this task"""
    operators: list[Event]
    """operator's calls that name it"""

    @property
    def name(self) -> str:
        """Key and id."""
        return f"{self.key}/{self.task}"

    @property
    def priority(self) -> int:
        """Its priority."""
        return self.publications[0].called.priority if self.publications else 5

    @property
    def tenant(self) -> str:
        """Its tenant; empty for none."""
        return self.publications[0].called.tenant if self.publications else ""

    @property
    def ordering_key(self) -> str:
        """Its ordering key; empty for none."""
        return self.publications[0].called.ordering_key if self.publications else ""

    @property
    def scheduled(self) -> bool:
        """Whether it was not to be delivered before some time."""
        return any(one.called.not_before is not None for one in self.publications)

    @property
    def stored(self) -> bool:
        """Whether the store has confirmed it."""
        return any(one.stored for one in self.publications) or self._retried

    @property
    def maybe(self) -> bool:
        """Whether the store may have it."""
        return any(one.maybe for one in self.publications) or self._retried

    @property
    def _retried(self) -> bool:
        return any(event.what is What.RETRY for event in self.operators)

    @property
    def settlements(self) -> list[tuple[Handout, Settlement]]:
        """All settlements of receipts that were handed out."""
        return [(handout, one) for handout in self.handouts for one in handout.settlements]


class History:
    """The merged events of a run, indexed."""

    def __init__(self, events: Iterable[Event]) -> None:
        """Index them. They need not be sorted."""
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
        """Return the events of some kinds, in order for each."""
        if len(whats) == 1:
            return self._by_what[whats[0]]
        return sorted((e for what in whats for e in self._by_what[what]), key=lambda e: e.at)

    def revived(self, story: Story, start: float, end: float) -> bool:
        """Whether an operator may have brought the task back to life between two times."""
        calls = [*story.operators, *(e for e in self._sweeping if e.key == story.key)]
        return any(
            event.what in {What.RETRY, What.REDRIVE} and start <= event.at <= end for event in calls
        )

    @cached_property
    def _sweeping(self) -> list[Event]:
        return [e for e in self.of(What.REDRIVE, What.DISCARD, What.PURGE) if not e.task]

    @cached_property
    def wall(self) -> float:
        """How far the store's clock is ahead of the monotonic one (all on one machine)."""
        offsets = [e.wall for e in self.of(What.STARTED) if e.wall is not None]
        return sorted(offsets)[len(offsets) // 2] if offsets else 0.0

    @cached_property
    def harm(self) -> Mapping[str, list[tuple[float, float]]]:
        """When each process was dead, frozen or cut off: spans by its name."""
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
        """Whether a process was out of action at some time between two, and long enough."""
        return any(
            begin <= end and over >= start and over - begin >= for_at_least
            for begin, over in self.harm.get(by, ())
        )

    @cached_property
    def _blind(self) -> list[float]:
        # A call that was given up may still be carried out, when what held it up is over.
        signs = (What.BLIND, What.KILLED, What.FROZEN, What.THAWED, What.CUT, What.MENDED)
        events = [*self.of(*signs), *self.of(What.CLOSE)]
        events += [e for e in self.of(What.HEALED) if e.target.startswith("redis")]
        return sorted(event.at for event in events)

    def blind(self, start: float, end: float) -> bool:
        """Whether something may have been handed out between two times that nobody saw."""
        at = bisect_left(self._blind, start)
        return at < len(self._blind) and self._blind[at] <= end

    def setting(self, name: str) -> dict[str, list[Event]]:
        """Return the changes of a setting by key."""
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
                # It was its holder's from the store's step on, even if that was frozen and saw it much later.
                since = min(event.at, (event.store_at or _INF) - self.wall)
                handout = Handout(event, [], [(since, event.by)])
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
