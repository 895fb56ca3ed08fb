"""A small model of schedules: two servers that fire one, requests that arrive late or twice, and an operator.

The servers plan by the code of the project. A task runs at once, or while others wait for room in the queue. Ids are
forgotten at once, so that a second fire of an instant is not hidden by the id of its task.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple, Self

from taskqueue_core.schedules import Every, Schedule, TaskTemplate, plan
from taskqueue_core.schedules.schedule import CatchUp
from tests.model.explore import Broken
from tests.model.instants import NAME, PAUSED, SECOND, Instants
from tests.model.schedules import Fire, Run, Schedules, Stored
from tests.model.terms import Flow, Terms
from tests.model.unique import Publish, Unique

_WORKER = "w1.1"


class Bounds(NamedTuple):
    """The schedule of an exploration, and what may happen to it."""

    catch_up: CatchUp = "all"
    late: int = 60
    """seconds after which an instant is skipped"""
    is_unique: bool = False
    """whether at most one task of the schedule is live"""
    capacity: int = 0
    instants: int = 3
    repeated: int = 1
    """number of requests that arrive a second time, perhaps much later"""
    changes: int = 1
    """number of changes by the operator"""


Step = tuple[str, "Firing | Broken"]


class Firing:
    """One state: the store, what the servers are about to do, and what became of the instants."""

    def __init__(self, bounds: Bounds, spec: type[Schedules] = Schedules) -> None:
        self.bounds = bounds
        ends = datetime.fromtimestamp(bounds.instants + 0.5, UTC)
        template = TaskTemplate(key=NAME[0])
        self.schedule = Schedule(
            NAME[1], Every(1), template, bounds.catch_up, late=bounds.late, overlap="allow", ends=ends
        )  # fmt: skip
        self.books = spec()
        self.books.configure(NAME[0], Terms(window=0, flow=Flow(capacity=bounds.capacity)))
        self.books.join(_WORKER, "w1", [NAME[0]])
        self.books.put_schedule(NAME, Stored(0, SECOND, None), 0, keep=False)
        self.instants = Instants()
        self.plans: tuple[Fire | None, ...] = (None, None)
        """what each server is about to ask the store for"""
        self.since = 1
        """first instant of the present schedule"""
        self.is_active = True
        """whether there is a schedule, and it is not paused"""
        self.used = 1
        """highest version that was used"""
        self.repeated, self.changes = bounds.repeated, bounds.changes
        self.requests = Counter[str]()
        """number of requests of servers in all states, by whether they were carried out; copies share it"""

    def copy(self) -> Self:
        """Return an independent copy."""
        copy = object.__new__(type(self))
        copy.__dict__ = dict(self.__dict__)
        copy.books = self.books.clone()
        copy.instants = Instants(self.instants)
        return copy

    def steps(self) -> Iterator[Step]:
        """Yield every step that is possible from this state."""
        if self.books.now <= self.bounds.instants * SECOND:
            world = self.copy()
            world.books.now += SECOND
            yield f"it is {world.books.now // SECOND}", world.checked()
        for server, fire in enumerate(self.plans):
            if fire is not None:
                yield from self.firing(server, fire)
            elif any(at <= self.books.now for at, _ in self.books.by_due_time()):
                world = self.copy()
                world.intend(server, self.planned())
                yield f"server {server} plans", world
        if self.changes:
            yield from self.changing()
        if self.books.open.get(NAME[0]):
            yield self.running()

    def intend(self, server: int, fire: Fire | None) -> None:
        """Set what a server is about to do. The servers are alike, so their order is not kept."""
        plans = [*self.plans[:server], fire, *self.plans[server + 1 :]]
        self.plans = tuple(sorted(plans, key=str))

    def planned(self) -> Fire:
        """Return what the schedule does now, as a server plans it."""
        stored = self.books.schedules[NAME]
        at, now = (stored.next_at or 0) // SECOND, self.books.now // SECOND
        tried = int(stored.refused.split(" ")[0]) // SECOND if stored.refused else None
        found = plan(self.schedule, at, max(now, at), tried)
        assert found is not None
        runs = (
            Run(round(instant) * SECOND, f"s.{instant:.0f}", self.task(f"s.{instant:.0f}"))
            for instant in found.instants
        )
        skips = ((round(s.first) * SECOND, s.count, s.reason.value) for s in found.skipped)
        following = None if found.next_at is None else round(found.next_at) * SECOND
        return Fire(NAME, stored.version, stored.next_at, following, tuple(runs), tuple(skips))

    def task(self, name: str) -> Publish:
        """Return the task of an instant."""
        return Publish(name, unique=Unique("s") if self.bounds.is_unique else None)

    def firing(self, server: int, fire: Fire) -> Iterator[Step]:
        """Let the request of a server arrive, perhaps not for the last time."""
        for again in (False, True)[: 1 + bool(self.repeated)]:
            world = self.copy()
            told = f"server {server} fires{', and its request will arrive again' if again else ''}"
            try:
                answers = world.books.fire(fire)
                world.instants.fired(fire, answers, self.books.schedules.get(NAME), world.books)
            except Broken as broken:
                yield told, broken
                return
            self.requests["stale" if answers is None else "carried out"] += 1
            if again:
                world.repeated -= 1
            else:
                world.intend(server, None)
            yield f"{told}: {'stale' if answers is None else answers}", world.checked()

    def changing(self) -> Iterator[Step]:
        """Change, pause, resume, delete or store the schedule, as an operator."""
        stored = self.books.schedules.get(NAME)
        if stored is None or not self.is_active:
            yield self.putting("resumes" if stored else "stores", self.following())
            return
        yield self.putting("changes", self.following(), keep=True)
        yield self.putting("pauses", None)
        world = self.copy()
        world.changes -= 1
        world.is_active = False
        told = world.books.delete_schedule(NAME, None)
        yield f"the operator deletes the schedule: {told}", world.checked()

    def following(self) -> int | None:
        """Return the first instant after now."""
        second = self.books.now // SECOND + 1
        return second * SECOND if second <= self.bounds.instants else None

    def putting(self, verb: str, next_at: int | None, *, keep: bool = False) -> Step:
        """Put the schedule, and repeat this, which must change nothing."""
        world, stored = self.copy(), self.books.schedules.get(NAME)
        world.changes -= 1
        given = Stored(0, next_at, None, spec=f"{self.books.puts}".encode())
        version = stored.version if stored else 0
        told = f"the operator {verb} the schedule"
        new = world.books.put_schedule(NAME, given, version, keep=keep)
        kept = dict(world.books.schedules)
        again = world.books.put_schedule(NAME, given, version, keep=keep)
        if isinstance(new, int) or new.version <= self.used:
            return told, Broken(f"versions: the put is answered {new}")
        if new != again or kept != world.books.schedules:
            return told, Broken("versions: a repeated put has changed the schedule")
        world.used, world.is_active = new.version, verb != "pauses"
        if verb in {"resumes", "stores"}:
            first = self.bounds.instants + 1 if next_at is None else next_at // SECOND
            world.since = self.since if stored else first
            for instant in range(1, first):
                world.instants.setdefault(instant, PAUSED)
        return told, world.checked()

    def running(self) -> Step:
        """Let the oldest task run."""
        world = self.copy()
        ((name, record),) = world.books.receive(_WORKER, 0, 1).given
        world.books.ack(name, record.fence, _WORKER)
        return f"{name[1]} runs", world.checked()

    def checked(self) -> Self | Broken:
        """Return this state, or the law that it breaks."""
        since = self.since if self.is_active else None
        try:
            self.instants.check(self.books, range(1, self.bounds.instants + 1), since)
        except Broken as broken:
            return broken
        return self

    def key(self) -> Hashable:
        """Return the key under which the exploration remembers this state."""
        stored = self.books.schedules.get(NAME)
        live = sorted((r.seq, name) for name, r in self.books.tasks.items() if r.live)
        return (
            self.books.now, stored and stored._replace(lines=(), spec=b""), self.plans, self.since, self.is_active,
            self.used, self.repeated, self.changes, tuple(sorted(self.instants.items())),
            tuple(name for _, name in live),
        )  # fmt: skip
