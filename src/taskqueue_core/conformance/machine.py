"""Random histories: a Hypothesis state machine drives the backend and holds it against the model.

A failure prints the shortest history that shows it, a call a line, with what the backend answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from taskqueue_core.backend import Capability, Subscription
from taskqueue_core.capabilities import QueueSettings, has
from taskqueue_core.conformance.bench import Bench
from taskqueue_core.conformance.draws import (
    KEYS,
    WORKERS,
    arrangements,
    batches,
    bounds,
    keys,
    names,
    owners,
    pauses,
    places,
    tasks,
    tellers,
)
from taskqueue_core.conformance.entries import Entry, Span
from taskqueue_core.conformance.harness import Harness
from taskqueue_core.conformance.model import Model
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import Delivery, Published, Settled, State, Task

__all__ = ["MachineSuite", "QueueMachine"]

T = TypeVar("T")

_WINDOW = 6
_MAX_LOSSES = 2


class QueueMachine(RuleBasedStateMachine):
    """Publishers, three subscriptions of two workers, an operator, and time. Its unit of time is half of ``short``.

    What is drawn never depends on what the backend answered, for on a store with a clock of its own the same history
    may be answered otherwise the second time. So a rule that finds nothing to act on does nothing.
    """

    harness: ClassVar[Harness]

    def __init__(self) -> None:
        """Open an event loop of its own."""
        super().__init__()
        self.runner = asyncio.Runner()
        self.opened = Bench.opened(self.harness)
        self.bench: Bench = self.runner.run(self.opened.__aenter__())
        self.unit = self.bench.short / 2
        self.slack = 0.0 if self.harness.manual_clock else self.unit / 5
        self.subscriptions: list[Subscription] = []
        self.deliveries: list[Delivery] = []
        self.model = Model(None)

    @initialize(
        limits=st.tuples(*[st.fixed_dictionaries(bounds)] * len(KEYS)),
        arranged=st.tuples(*[arrangements] * len(KEYS)),
    )
    def open(
        self, limits: tuple[dict[str, Any], ...], arranged: tuple[dict[str, Any], ...]
    ) -> None:
        """Set short windows, limits and orders, where settings can be set, and open the subscriptions."""
        self.model = Model(self._run(self._configure()))
        for key, some, order in zip(KEYS, limits, arranged, strict=True):
            if self._has(Capability.FLOW):
                self.limit(key, some)
            if self._has(Capability.ORDER):
                self.arrange(key, order)
        self.subscriptions = [self.bench.subscribe(*KEYS, consumer=name) for name in WORKERS]

    @rule(key=keys, chosen=batches, fields=tasks)
    def publish(self, key: str, chosen: list[str], fields: dict[str, Any]) -> None:
        """Publish tasks: fresh ones, known ones, ones with another payload."""
        dates = {name: self._at(fields[name]) for name in ("not_before", "deadline")}
        entity = fields["ordering_key"] if self._has(Capability.ORDER) else None
        told = {**fields, **dates, "ordering_key": entity}
        fresh = [self.bench.task(name, key=key, **told) for name in chosen]
        answers, span = self._timed(self.bench.backend.publisher.publish(*fresh))
        for task, answer in zip(fresh, answers, strict=True):
            self.model.published(task, answer, span)
        self._done(", ".join(answer.status for answer in answers))

    @rule(owner=owners, limit=st.integers(1, 4))
    def receive(self, owner: int, limit: int) -> None:
        """Receive what is there."""
        answer, span = self._timed(self.subscriptions[owner].receive(limit, 0))
        self.model.received(owner, KEYS, limit, answer, span)
        found = [told(delivery) for delivery in answer.deliveries]
        found += [f"expired {entry.key}/{entry.task_id}" for entry in answer.expired]
        self.deliveries += answer.deliveries
        self._done(", ".join(found) or "nothing")

    @rule(owner=owners, chosen=st.lists(places, min_size=1, max_size=3))
    def ack(self, owner: int, chosen: list[int]) -> None:
        """Ack deliveries, current or not."""
        if found := self._chosen(*chosen):
            self._settle("ack", found, self.subscriptions[owner].ack(*found))

    @rule(owner=owners, chosen=st.lists(places, min_size=1, max_size=3))
    def redeliver(self, owner: int, chosen: list[int]) -> None:
        """Hand deliveries back."""
        if found := self._chosen(*chosen):
            self._settle("redeliver", found, self.subscriptions[owner].redeliver(*found))

    @precondition(lambda self: self._has(Capability.DEAD_LETTERS))
    @rule(teller=tellers, place=places)
    def lose(self, teller: int | None, place: int) -> None:
        """Hand a delivery back as lost: only its owner can tell."""
        for delivery in self._chosen(place):
            owner = self.model.owners[delivery.receipt]
            teller = owner if teller is None else teller
            call = self.subscriptions[teller].redeliver(delivery, lost=True)
            self._settle("lost", [delivery], call, foreign=teller != owner)

    @precondition(lambda self: self._has(Capability.DEAD_LETTERS))
    @rule(owner=owners, place=places)
    def dead_letter(self, owner: int, place: int) -> None:
        """Bury a delivery."""

        async def bury(delivery: Delivery) -> tuple[Settled, ...]:
            return (await self.bench.bury(self.subscriptions[owner], delivery),)

        for delivery in self._chosen(place):
            self._settle("dead_letter", [delivery], bury(delivery))

    @precondition(lambda self: self.bench.backend.capabilities.atomic_retry)
    @rule(place=places, delay=st.integers(0, 3))
    def retry(self, place: int, delay: int) -> None:
        """Schedule a retry that settles a delivery, current or not."""
        for delivery in self._chosen(place):
            self._retry(delivery.task, delay, None, delivery)

    @precondition(lambda self: self.bench.backend.capabilities.atomic_retry)
    @rule(
        key=keys,
        name=names,
        delay=st.integers(0, 3),
        token=st.sampled_from([None, None, "a", "attempt:1"]),
    )
    def retry_from_afar(self, key: str, name: str, delay: int, token: str | None) -> None:
        """Schedule a retry with no delivery in hand, of a live, a dead, an ended or an unheard-of task."""
        entry = self.model.entries.get((key, name))
        task = self.bench.task(name, key=key, payload=1) if entry is None else entry.task
        if entry is None or self.model.surely_known(entry, self._span()):
            self._retry(task, delay, token, None)

    @precondition(lambda self: self._has(Capability.DEAD_LETTERS))
    @rule(key=keys, chosen=st.lists(names, max_size=2, unique=True))
    def redrive(self, key: str, chosen: list[str]) -> None:
        """Redrive some dead tasks, or all."""
        if not self._any(State.DEAD):
            return
        moved, span = self._timed(self.bench.dead_letters.redrive(key, *chosen))
        self.model.redriven(self._dead(key, chosen, moved), span)
        self._done(f"{moved} redriven")

    @precondition(lambda self: self._has(Capability.DEAD_LETTERS))
    @rule(key=keys, chosen=st.lists(names, max_size=2, unique=True))
    def discard(self, key: str, chosen: list[str]) -> None:
        """Discard some dead tasks, or all."""
        if not self._any(State.DEAD):
            return
        moved, span = self._timed(self.bench.dead_letters.discard(key, *chosen))
        for entry in self._dead(key, chosen, moved):
            self.model.ended(entry, State.DISCARDED, span)
        self._done(f"{moved} discarded")

    @precondition(lambda self: self._has(Capability.CONTROL))
    @rule(key=keys, name=names)
    def cancel(self, key: str, name: str) -> None:
        """Cancel a task."""
        if not self.model.entries:
            return
        answer, span = self._timed(self.bench.control.cancel(key, name))
        entry = self.model.entries.get((key, name))
        live = entry is not None and entry.state.live
        if entry is None or not entry.maybe_late(span):
            assert answer is live, f"cancel answered {answer} for a task that was live: {live}"
        if answer and entry is not None:
            self.model.ended(entry, State.CANCELLED, span)
        self._done("cancelled" if answer else "not live")

    @rule(owner=owners)
    def close(self, owner: int) -> None:
        """Close a subscription and open another in its place."""
        self._run(self.subscriptions[owner].close())
        self.model.closed(owner)
        self.subscriptions[owner] = self.bench.subscribe(*KEYS, consumer=WORKERS[owner])
        self._done("closed, and another one opened")

    @precondition(lambda self: self._has(Capability.HANDOVER))
    @rule(owner=owners, place=places)
    def adopt(self, owner: int, place: int) -> None:
        """Adopt a delivery, one's own worker's or another's, current or not."""
        same = [index for index, worker in enumerate(WORKERS) if worker == WORKERS[owner]]
        for delivery in self._chosen(place):
            call = self.bench.adopt(self.subscriptions[owner], delivery.receipt)
            (answer,), span = self._timed(call)
            self.model.adopted(owner, same, delivery, answer, span)
            self._done(f"{told(delivery)} {'adopted' if answer else 'not adopted'}")

    @precondition(lambda self: self._has(Capability.FLOW))
    @rule(key=keys, limits=st.fixed_dictionaries({}, optional=bounds | pauses))
    def limit(self, key: str, limits: dict[str, Any]) -> None:
        """Limit the flow of a queue, or lift some of its limits."""
        if patience := limits.get("max_processing_time"):
            limits = {**limits, "max_processing_time": patience * self.unit}
        settings, span = self._timed(self.bench.configure(key, **limits))
        self.model.configured(key, settings, span)
        self._done("in force")

    @precondition(lambda self: self._has(Capability.ORDER))
    @rule(key=keys, arranged=arrangements)
    def arrange(self, key: str, arranged: dict[str, Any]) -> None:
        """Change who is next in a queue."""
        settings, span = self._timed(self.bench.configure(key, **arranged))
        self.model.configured(key, settings, span)
        self._done("in force")

    @precondition(lambda self: self._has(Capability.CONTROL))
    @rule(place=places)
    def progress(self, place: int) -> None:
        """Report progress of a delivery, current or not."""
        for delivery in self._chosen(place):
            answer, span = self._timed(self.bench.control.progress(delivery, 0.5))
            self.model.progressed(delivery, span, answer=answer)
            self._done(f"{told(delivery)} {'noted' if answer else 'not noted'}")

    @rule(units=st.integers(1, 7))
    def advance(self, units: int) -> None:
        """Let time pass."""
        self._run(self.bench.advance(units * self.unit))
        self._done("")

    @precondition(lambda self: self._has(Capability.CONTROL))
    @rule()
    def maintain(self) -> None:
        """Do the housekeeping, until nothing is left to do."""
        if not self.model.entries:
            return
        span = self._span()
        expired = 0
        for _ in range(10):
            done, (_, end) = self._timed(self.bench.control.maintain())
            expired += len(done.expired)
            self.model.expired(done.expired, (span[0], end))
            if not (done.promoted or done.expired or done.forgotten or done.recovered):
                break
        self.model.maintained(span)
        late = [entry.name for entry in self.model.entries.values() if entry.surely_late(span)]
        assert not late, f"housekeeping left {late} alive after their deadlines (law 8)"
        self._done(f"{expired} expired")

    def teardown(self) -> None:
        """Close the backend and the loop."""
        try:
            self.runner.run(self.opened.__aexit__(None, None, None))
        finally:
            self.runner.close()

    async def _configure(self) -> QueueSettings | None:
        if not self._has(Capability.CONTROL):
            return None
        chosen = QueueSettings(max_losses=_MAX_LOSSES, dedupe_window=_WINDOW * self.unit)
        for key in KEYS:
            await self.bench.control.configure(key, chosen)
        return chosen

    def _settle(
        self,
        verb: str,
        chosen: Sequence[Delivery],
        call: Coroutine[Any, Any, tuple[Settled, ...]],
        *,
        foreign: bool = False,
    ) -> None:
        start, _ = self._span()
        try:
            answers = self._run(call)
        except LeaseLost:
            answers = (Settled.LEASE_LOST,)
            assert len(chosen) == 1, "a batch answers per receipt, it does not raise (law 2)"
        else:
            assert answers != (Settled.LEASE_LOST,), (
                "a single stale receipt must raise LeaseLost (law 2)"
            )
        for delivery, answer in zip(chosen, answers, strict=True):
            self.model.settled(verb, delivery, answer, (start, self._span()[1]), foreign=foreign)
        pairs = zip(chosen, answers, strict=True)
        self._done(", ".join(f"{told(delivery)} {answer}" for delivery, answer in pairs))

    def _chosen(self, *places: int) -> list[Delivery]:
        count = len(self.deliveries)
        return [self.deliveries[-1 - place % count] for place in places] if count else []

    def _retry(self, task: Task, delay: int, token: str | None, settles: Delivery | None) -> None:
        publisher, at = self.bench.backend.publisher, self.bench.now + delay * self.unit
        answer: Published | None = None
        start, _ = self._span()
        try:
            call = publisher.schedule_retry(task, at, error="failed", token=token, settles=settles)
            answer = self._run(call).status
        except LeaseLost:
            assert settles is not None, "LeaseLost without a delivery in hand"
        span = (start, self._span()[1])
        self.model.retried(task, at, answer, span, token=token, settles=settles)
        about = told(settles) if settles else f"{task.key}/{task.id}"
        self._done(f"{about} {answer or 'lease_lost'}")

    def _dead(self, key: str, chosen: Sequence[str], moved: int) -> list[Entry]:
        entries = [self.model.entries.get((key, name)) for name in chosen]
        if not chosen:
            entries = [entry for entry in self.model.entries.values() if entry.task.key == key]
        dead = [entry for entry in entries if entry is not None and entry.state is State.DEAD]
        assert moved == len(dead), f"{moved} moved of {len(dead)} dead (law 1)"
        return dead

    def _any(self, *states: State) -> bool:
        return any(entry.state in states for entry in self.model.entries.values())

    def _done(self, answer: str) -> None:
        """Print what was answered above the call, and compare the store's accounts with the model's."""
        note(f"# {self.bench.now:.3f}: {answer}")
        for key in KEYS if self._has(Capability.CONTROL) else ():
            known = [task_id for queue, task_id in self.model.entries if queue == key]
            start, _ = self._span()
            ledger = self._run(self.bench.control.ledger(key))
            found = self._run(self.bench.control.statuses(key, *known))
            span = (start, self._span()[1])
            self.model.check(key, ledger, dict(zip(known, found, strict=True)), span)

    def _at(self, units: int | None) -> float | None:
        return None if units is None else self.bench.now + units * self.unit

    def _has(self, capability: Capability) -> bool:
        return has(self.bench.backend, capability)

    def _span(self) -> Span:
        now = self.bench.now
        return now - self.slack, now + self.slack

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def _timed(self, call: Coroutine[Any, Any, T]) -> tuple[T, Span]:
        start, _ = self._span()
        answer = self._run(call)
        return answer, (start, self._span()[1])


def told(delivery: Delivery) -> str:
    """Name a delivery."""
    return f"{delivery.task.key}/{delivery.task.id} attempt {delivery.attempt}"


class MachineSuite(Harness):
    """Random histories against the model."""

    def test_machine(self) -> None:
        """No history of calls, limits and time breaks a law (laws 1, 2, 3, 4, 5, 6, 7, 8, 9, 10; C26, D5)."""
        machine = type("Machine", (QueueMachine,), {"harness": self})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.max_examples,
                stateful_step_count=50,
                deadline=None,
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
