"""A model of the whole system ("world") that is small enough to visit all its states.

It has a few tasks, two workers and a bounded number of faults: a worker is killed, or frozen until the store gives it
up; the answer of a call is lost, or its request arrives late; the master dies while its replica lags by one write.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Self

from tests.model.acts import give_up, leave, maintain, receive, settle
from tests.model.books import Name, Record
from tests.model.canonical import key_of
from tests.model.deliveries import Gone
from tests.model.explore import Broken
from tests.model.laws import Fate, Fates, Receipt
from tests.model.players import AGE, Held, Plan, Todo, Worker
from tests.model.spec import Spec
from tests.model.terms import Flow, Terms
from tests.model.unique import Publish

Step = tuple[str, "Small | Broken"]


class Small:
    """One state of the modelled system: the store, the workers, what the laws expect, and the remaining faults."""

    def __init__(self, plan: Plan, spec: type[Spec] = Spec) -> None:
        self.plan = plan
        self.books = spec()
        self.workers = (Worker("w1"), Worker("w2"))
        self.fates = Fates({(todo.key, todo.id): Fate() for todo in plan.todo})
        self.late: tuple[tuple[str, int], ...] = ()
        """receives still on their way to the store, although their callers no longer wait for them"""
        self.crashes, self.lost, self.failovers = plan.crashes, plan.lost, plan.failovers
        self.faults = plan.faults
        self.keys = sorted({todo.key for todo in plan.todo})
        for key in self.keys:
            flow = Flow(max_inflight=plan.max_inflight)
            self.books.configure(key, Terms(max_losses=plan.max_losses, flow=flow))
        for worker in self.workers:
            self.books.join(worker.token, worker.name, self.keys)

    def copy(self) -> Self:
        """Return an independent copy of the state, one microsecond later."""
        copy = object.__new__(type(self))
        copy.__dict__ = dict(self.__dict__)
        copy.books = self.books.clone()
        copy.books.now += 1
        copy.fates = Fates(self.fates)
        return copy

    def change(self, which: int, **values: Any) -> None:
        """Change fields of a worker."""
        workers = list(self.workers)
        workers[which] = workers[which]._replace(**values)
        self.workers = tuple(workers)  # type: ignore[assignment] # still two

    def spend(self, what: str) -> None:
        """Use up one fault of a kind, so that fewer remain."""
        setattr(self, what, getattr(self, what) - 1)
        self.faults -= 1
        if not self.faults:
            self.crashes = self.lost = self.failovers = 0

    def steps(self) -> Iterator[Step]:
        """Yield every step that is possible from this state."""
        sent: dict[Todo, bool] = {}
        for todo in self.plan.todo:
            # If tasks are otherwise identical, exploring one order of publishing them is enough.
            kind = todo._replace(id="")
            if sent.get(kind, True):
                yield from self.publishing(todo)
            fate = self.fates[todo.key, todo.id]
            sent[kind] = bool(fate.state) or fate.confirmed
            if todo.cancelled and self.fates[todo.key, todo.id].state:
                yield from self.cancelling((todo.key, todo.id))
            if self.fates[todo.key, todo.id].state == "dead":
                yield from self.redriving((todo.key, todo.id))
        for which, worker in enumerate(self.workers):
            if worker.alive:
                yield from self.taking(which)
                for held in worker.held:
                    yield from self.settling(which, held)
                yield from self.stealing(which)
                yield from self.ending(which)
        for token, turn in self.late:
            yield from self.arriving(token, turn)
        yield from self.keeping_house()

    def call(
        self, told: str, act: Callable[[Small], Any], learn: Callable[[Small, Any], None],
        unsure: Callable[[Small], None], *, waits: bool = False,
    ) -> Iterator[Step]:  # fmt: skip
        """Yield the possible outcomes of a call: answered, answer lost, or answered and then undone by a failover."""
        world = self.copy()
        try:
            answer = act(world)
        except Broken as broken:
            yield told, broken
            return
        changed = world.books.tasks != self.books.tasks
        told = f"{told}: {_shown(answer)}"
        answered = world.copy()
        learn(answered, answer)
        if changed or answered.workers != self.workers or answered.fates != self.fates:
            yield told, answered.checked()
        else:
            yield told, self
        if self.lost and changed:
            lost = world.copy()
            lost.spend("lost")
            unsure(lost)
            yield f"{told}, but the answer is lost", lost.checked()
        if self.failovers and changed:
            undone = world.copy()
            undone.spend("failovers")
            (_told_nothing(unsure) if waits else learn)(undone, answer)
            undone.undo(self)
            yield f"{told}; the master dies, and its replica has none of it", undone.checked()

    def undo(self, before: Small) -> Self:
        """Reset the store to an earlier state; every live worker must then check which deliveries it still has."""
        now = self.books.now
        self.books = before.books.clone()
        self.books.now = now
        self.fates = self.fates.undone(before.fates)
        for which, worker in enumerate(self.workers):
            self.change(which, doubt=2 if worker.alive else 0)
        return self

    def publishing(self, todo: Todo) -> Iterator[Step]:
        """Publish a task, possibly not for the first time."""
        name = todo.key, todo.id
        due = AGE if todo.delayed else 0
        task = Publish(todo.id, "", todo.priority, due, 2 * AGE if todo.mortal else 0)

        def act(world: Small) -> Any:
            (answer,) = world.books.publish(todo.key, [task])
            world.fates.promoted(world.books)
            world.fates.published(name, answer, due, world.books.now)
            return answer

        def learn(world: Small, _: Any) -> None:
            world.fates.change(name, confirmed=True)

        waits = self.plan.replicated
        yield from self.call(f"publish {todo.id}", act, learn, _nothing, waits=waits)

    def cancelling(self, name: Name) -> Iterator[Step]:
        """Cancel a task, as an operator."""

        def act(world: Small) -> Any:
            answer = world.books.cancel(name)
            if answer:
                world.fates.ended(name, "cancelled")
            return answer

        def learn(world: Small, answer: Any) -> None:
            if answer:
                world.fates.change(name, told="cancelled")

        yield from self.call(f"cancel {name[1]}", act, learn, _nothing)

    def redriving(self, name: Name) -> Iterator[Step]:
        """Redrive a dead task, as an operator."""

        def act(world: Small) -> Any:
            answer = world.books.redrive(name)
            if answer:
                world.fates.available(name)
                world.fates.change(name, losses=0)
            return answer

        yield from self.call(f"redrive {name[1]}", act, _ignore, _nothing)

    def keeping_house(self) -> Iterator[Step]:
        """Let time pass until a task is due or expires, run maintenance, or give up a consumer."""
        now = self.books.now
        times = [time for r in self.books.tasks.values() if r.live for time in (r.due, r.deadline)]
        if coming := [time for time in times if time > now]:
            world = self.copy()
            world.books.now = min(coming)
            yield (
                f"time passes, until {'what is due' if min(coming) % (2 * AGE) else 'a deadline'}",
                world,
            )
        if any(0 < time <= now for time in times):
            yield from self.call("maintain", maintain, _ignore, _nothing)
        for token in tuple(self.books.consumers):
            which = int(token[1]) - 1
            worker = self.workers[which]
            frozen = worker.alive and worker.token == token
            if self.crashes or not frozen:
                act = partial(give_up, token, self.plan.max_losses)
                told = f"maintain gives {token} up"
                for said, following in self.call(told, act, _ignore, _nothing):
                    if frozen and isinstance(following, Small):
                        if not following.crashes:
                            continue  # skip it, because all crashes of the plan are used up
                        following.spend("crashes")
                    yield said, following

    def taking(self, which: int) -> Iterator[Step]:
        """Receive as a worker; if an earlier answer was lost, list its deliveries first."""
        worker = self.workers[which]
        if worker.doubt:
            yield from self.looking(which)
            return
        act = partial(receive, worker.token, worker.turn, self.plan.limit)

        def learn(world: Small, given: Any) -> None:
            if given is None:
                starts = worker.starts + 1
                world.change(which, starts=starts, turn=0)
                world.books.join(world.workers[which].token, worker.name, self.keys)
                return
            world.change(which, held=worker.held + _held(given))

        def unsure(world: Small) -> None:
            world.change(which, doubt=1, turn=worker.turn + 1)

        yield from self.call(f"{worker.token} receives", act, learn, unsure)
        if self.lost and worker.token in self.books.consumers:
            world = self.copy()
            world.spend("lost")
            unsure(world)
            world.late = (*self.late, (worker.token, worker.turn))
            yield f"{worker.token} receives, but its request is late", world

    def looking(self, which: int) -> Iterator[Step]:
        """List a worker's deliveries; keep unknown ones, or return them if a failover may have undone acks."""
        worker = self.workers[which]
        undone = worker.doubt == 2

        def act(world: Small) -> Any:
            try:
                found = world.books.pending(worker.token, worker.turn)
            except Gone:
                return []
            seen = {(held.name, held.receipt) for held in worker.held}
            return [
                one for one in found if (one[0], Receipt(worker.token, one[1].fence)) not in seen
            ]

        def learn(world: Small, found: Any) -> None:
            held = worker.held + (() if undone else _held(found))
            world.change(which, doubt=0, held=held)
            for name, record in found if undone else ():
                settle(
                    name, Receipt(worker.token, record.fence), record.attempt, "redeliver", world
                )

        yield from self.call(f"{worker.token} asks what it has", act, learn, _nothing)

    def settling(self, which: int, held: Held) -> Iterator[Step]:
        """Settle a worker's delivery with each allowed verb, or repeat a settlement whose answer was lost."""
        worker = self.workers[which]
        todo = next(one for one in self.plan.todo if (one.key, one.id) == held.name)
        for verb in (held.verb,) if held.verb else todo.verbs:
            if verb == "retry" and held.attempt >= self.plan.attempts:
                continue
            if verb == "lost" and self.fates[held.name].losses >= self.plan.max_losses:
                continue
            act = partial(settle, held.name, held.receipt, held.attempt, verb)
            rest = tuple(one for one in worker.held if one != held)

            def learn(world: Small, answer: Any, rest: Any = rest, verb: str = verb) -> None:
                world.change(which, held=rest)
                if verb == "ack" and answer == "ok":
                    world.fates.change(held.name, told="done")

            def unsure(world: Small, rest: Any = rest, verb: str = verb) -> None:
                world.change(which, held=(*rest, held._replace(verb=verb)))

            receipt = f"receipt {held.receipt.fence} of {held.receipt.token}"
            told = f"{worker.token} sends the {verb} of {held.name[1]} ({receipt})"
            waits = self.plan.replicated and verb == "retry"
            yield from self.call(told, act, learn, unsure, waits=waits)

    def stealing(self, which: int) -> Iterator[Step]:
        """Ack, with a forged receipt, a delivery that another worker has in flight."""
        worker = self.workers[which]
        for name, record in self.books.tasks.items():
            if record.owner and record.owner != worker.token:
                forged = Receipt(worker.token, record.fence)
                if any(held.receipt == forged for held in worker.held):
                    continue
                act = partial(settle, name, forged, record.attempt, "ack", known=False)
                yield from self.call(
                    f"{worker.token} acks {name[1]}, which it never had", act, _ignore, _nothing
                )

    def ending(self, which: int) -> Iterator[Step]:
        """Kill a worker, or end it gracefully."""
        worker = self.workers[which]
        if self.crashes:
            world = self.copy()
            world.spend("crashes")
            world.change(which, alive=False, held=(), doubt=0)
            yield f"{worker.token} is killed", world
        if self.plan.leaving and which:
            act = partial(leave, worker.token)

            def learn(world: Small, _: Any) -> None:
                world.change(which, alive=False, held=(), doubt=0)

            yield from self.call(f"{worker.token} leaves", act, learn, _nothing)

    def arriving(self, token: str, turn: int) -> Iterator[Step]:
        """Let a delayed receive reach the store after its caller has stopped waiting."""
        act = partial(receive, token, turn, self.plan.limit)
        for told, world in self.call(
            f"the late receive of {token} arrives", act, _ignore, _nothing
        ):
            if isinstance(world, Small):
                world.late = tuple(one for one in self.late if one != (token, turn))
            yield told, world

    def checked(self) -> Self | Broken:
        """Return this state, or the law that it breaks."""
        try:
            self.fates.check(self.books, replicated=self.plan.replicated)
            for worker in self.workers:
                self.knows(worker)
        except Broken as broken:
            return broken
        return self

    def knows(self, worker: Worker) -> None:
        """Raise `Broken` if a worker has an unseen delivery in flight and is not about to list its deliveries."""
        if not worker.alive or worker.doubt:
            return
        seen = {(held.name, held.receipt) for held in worker.held}
        for name, r in self.books.tasks.items():
            if r.owner == worker.token and (name, Receipt(r.owner, r.fence)) not in seen:
                raise Broken(
                    f"R14: {name[1]} is in flight with {worker.token}, who knows nothing of it and asks nobody"
                )

    def key(self) -> Hashable:
        """Return the key under which the exploration remembers this state."""
        return key_of(self)


def _shown(answer: Any) -> str:
    if isinstance(answer, list):
        return ", ".join(f"{name[1]} (receipt {r.fence})" for name, r in answer) or "nothing"
    return "given up, so it joins anew" if answer is None else str(answer)


def _held(given: list[tuple[Name, Record]]) -> tuple[Held, ...]:
    return tuple(Held(name, Receipt(r.token, r.fence), r.attempt) for name, r in given)


def _told_nothing(unsure: Callable[[Small], None]) -> Callable[[Small, Any], None]:
    return lambda world, _: unsure(world)


def _nothing(_: Small) -> None:
    """Stands for a caller that learns nothing from a lost answer."""


def _ignore(_: Small, __: Any) -> None:
    """Stands for a caller that does not record the answer."""
