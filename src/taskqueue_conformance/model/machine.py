"""Random histories: a Hypothesis state machine calls the backend, and compares its answers with the model.

A failure prints the shortest failing history that was found, one call per line, with the backend's answers.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
)

from taskqueue_conformance.harness import Harness
from taskqueue_conformance.histories import play
from taskqueue_conformance.model.batch_rules import BatchRules
from taskqueue_conformance.model.draws import (
    KEYS,
    WORKERS,
    arrangements,
    batch_names,
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
from taskqueue_conformance.model.model import Model
from taskqueue_conformance.model.moves import name_of
from taskqueue_conformance.model.schedule_rules import ScheduleRules
from taskqueue_core.backend import Capability
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Settled, State


class QueueMachine(ScheduleRules, BatchRules):
    """A state machine of publishers, three subscriptions of two workers, an operator and a clock.

    A unit of time is half of ``short``. The random values never depend on the backend's answers, because a store with
    its own clock may answer differently when a history is replayed. For the same reason, a rule that finds nothing to
    act on does nothing, instead of being skipped.
    """

    @initialize(
        limits=st.tuples(*[st.fixed_dictionaries(bounds)] * len(KEYS)),
        arranged=st.tuples(*[arrangements] * len(KEYS)),
    )
    def open(
        self, limits: tuple[dict[str, Any], ...], arranged: tuple[dict[str, Any], ...]
    ) -> None:
        """Configure short dedupe windows and, if supported, the given limits and orders; then open subscriptions."""
        self.model = Model(self.run(self.prepare()))
        for key, limit, order in zip(KEYS, limits, arranged, strict=True):
            if self.has(Capability.FLOW):
                self.limit(key, limit)
            if self.supported(order):
                self.arrange(key, order)
        self.subscriptions = [self.bench.subscribe(*KEYS, consumer=name) for name in WORKERS]

    @rule(key=keys, chosen=batches, fields=tasks)
    def publish(self, key: str, chosen: list[str], fields: dict[str, Any]) -> None:
        """Publish new tasks, duplicates, and tasks that have known ids but different payloads."""
        fresh = [self.made(key, name, fields) for name in chosen]
        answers, span = self.timed(self.bench.backend.publisher.publish(*fresh))
        for task, answer in zip(fresh, answers, strict=True):
            self.model.published(task, answer, span)
        self.done(", ".join(answer.status for answer in answers))

    @rule(owner=owners, limit=st.integers(1, 4) | st.just(LIMITS.call))
    def receive(self, owner: int, limit: int) -> None:
        """Receive available tasks without waiting."""
        answer, span = self.timed(self.subscriptions[owner].receive(limit, 0))
        self.model.received(owner, KEYS, limit, answer, span)
        matches = [name_of(delivery) for delivery in answer.deliveries]
        matches += [f"expired {entry.key}/{entry.task_id}" for entry in answer.expired]
        self.deliveries += answer.deliveries
        self.done(", ".join(matches) or "nothing")

    @rule(key=keys, chosen=batches, fields=tasks, owner=owners, limit=st.integers(1, 4))
    def publish_and_receive(
        self, *, key: str, chosen: list[str], fields: dict[str, Any], owner: int, limit: int
    ) -> None:
        """Publish tasks, then receive at once."""
        self.publish(key, chosen, fields)
        self.receive(owner, limit)

    @rule(served=st.lists(owners, min_size=2, max_size=6))
    def serve(self, served: list[int]) -> None:
        """Receive one task at a time, through several subscriptions in turn."""
        for owner in served:
            self.receive(owner, 1)

    @rule(owner=owners, chosen=st.lists(places, min_size=1, max_size=3))
    def ack(self, owner: int, chosen: list[int]) -> None:
        """Ack deliveries. Their receipts may be stale."""
        if deliveries := self.latest(self.deliveries, *chosen):
            results = [None if one.task.id == "t1" else one.task.payload for one in deliveries]
            call = self.subscriptions[owner].ack(*deliveries, results=results)
            self.settle("ack", deliveries, call, results=results)

    @rule(owner=owners, chosen=st.lists(places, min_size=1, max_size=3))
    def redeliver(self, owner: int, chosen: list[int]) -> None:
        """Release deliveries. Their receipts may be stale."""
        if deliveries := self.latest(self.deliveries, *chosen):
            self.settle("redeliver", deliveries, self.subscriptions[owner].redeliver(*deliveries))

    @precondition(lambda self: self.has(Capability.DEAD_LETTERS))
    @rule(teller=tellers, index=places)
    def lose(self, teller: int | None, index: int) -> None:
        """Report a delivery as lost. This must be refused unless the subscription owns the delivery."""
        for delivery in self.latest(self.deliveries, index):
            owner = self.model.owners[delivery.receipt]
            teller = owner if teller is None else teller
            call = self.subscriptions[teller].redeliver(delivery, lost=True)
            self.settle("lost", [delivery], call, foreign=teller != owner)

    @precondition(lambda self: self.has(Capability.DEAD_LETTERS))
    @rule(owner=owners, index=places)
    def dead_letter(self, owner: int, index: int) -> None:
        """Turn the task of a delivery into a dead letter. The receipt of the delivery may be stale."""

        async def bury(delivery: Delivery) -> tuple[Settled, ...]:
            return (await self.bench.bury(self.subscriptions[owner], delivery),)

        for delivery in self.latest(self.deliveries, index):
            self.settle("dead_letter", [delivery], bury(delivery))

    @precondition(lambda self: self.bench.backend.capabilities.atomic_retry)
    @rule(index=places, delay=st.integers(0, 3), free=st.booleans())
    def retry(self, index: int, delay: int, *, free: bool = False) -> None:
        """Schedule a retry that settles a delivery. The receipt of the delivery may be stale."""
        for delivery in self.latest(self.deliveries, index):
            self.schedule(delivery.task, delay, None, delivery, free=free)

    @precondition(lambda self: self.bench.backend.capabilities.atomic_retry)
    @rule(
        key=keys,
        name=names,
        delay=st.integers(0, 3),
        token=st.sampled_from([None, None, "a", "attempt:1"]),
        free=st.booleans(),
    )
    def retry_from_afar(
        self, *, key: str, name: str, delay: int, token: str | None, free: bool
    ) -> None:
        """Schedule a retry, without a delivery, for a task that may be live, dead, ended or unknown."""
        entry = self.model.entries.get((key, name))
        task = self.bench.task(name, key=key, payload=1) if entry is None else entry.task
        if entry is None or self.model.surely_known(entry, self.span()):
            self.schedule(task, delay, token, None, free=free)

    @precondition(lambda self: self.has(Capability.DEAD_LETTERS))
    @rule(key=keys, chosen=st.lists(names, max_size=2, unique=True))
    def redrive(self, key: str, chosen: list[str]) -> None:
        """Redrive some dead letters of a queue, or all of them."""
        if not self.any(State.DEAD):
            return
        moved, span = self.timed(self.bench.dead_letters.redrive(key, *chosen))
        self.model.redriven(self.the_dead(key, chosen, moved), span)
        self.done(f"{moved} redriven")

    @precondition(lambda self: self.has(Capability.DEAD_LETTERS))
    @rule(key=keys, chosen=st.lists(names, max_size=2, unique=True))
    def discard(self, key: str, chosen: list[str]) -> None:
        """Discard some dead letters of a queue, or all of them."""
        if not self.any(State.DEAD):
            return
        moved, span = self.timed(self.bench.dead_letters.discard(key, *chosen))
        for entry in self.the_dead(key, chosen, moved):
            self.model.ended(entry, State.DISCARDED, span)
        self.done(f"{moved} discarded")

    @precondition(lambda self: self.has(Capability.CONTROL))
    @rule(key=keys, name=names | batch_names)
    def cancel(self, key: str, name: str) -> None:
        """Cancel a task. It may have ended or be unknown."""
        if not self.model.entries:
            return
        answer, span = self.timed(self.bench.control.cancel(key, name))
        entry = self.model.entries.get((key, name))
        live = entry is not None and entry.state.live
        if entry is None or not entry.maybe_late(span):
            assert answer is live, f"cancel answered {answer}; the task was live: {live}"
        if answer and entry is not None:
            self.model.ended(entry, State.CANCELLED, span)
        self.done("cancelled" if answer else "not live")

    @precondition(lambda self: self.has(Capability.CONTROL))
    @rule(key=keys, name=names, delay=st.integers(0, 3))
    def reschedule(self, key: str, name: str, delay: int) -> None:
        """Give a task another time. It may be running, have ended or be unknown."""
        if not self.model.entries:
            return
        at = self.bench.now + delay * self.unit
        answer, span = self.timed(self.bench.control.reschedule(key, name, at))
        self.model.rescheduled(key, name, at, span, answer=answer)
        self.done("rescheduled" if answer else "not rescheduled")

    @precondition(lambda self: self.has(Capability.CONTROL))
    @rule(key=keys)
    def purge(self, key: str) -> None:
        """End all tasks of a queue that are not running."""
        if not self.model.entries:
            return
        number, span = self.timed(self.bench.control.purge(key))
        self.model.purged(key, number, span)
        self.done(f"{number} purged")

    @rule(owner=owners)
    def close(self, owner: int) -> None:
        """Close a subscription, and open another subscription for the same worker."""
        self.run(self.subscriptions[owner].close())
        self.model.closed(owner)
        self.subscriptions[owner] = self.bench.subscribe(*KEYS, consumer=WORKERS[owner])
        self.done("closed, and another one opened")

    @precondition(lambda self: self.has(Capability.HANDOVER))
    @rule(owner=owners, position=places)
    def adopt(self, owner: int, position: int) -> None:
        """Adopt a delivery of the same worker or of another worker. Its receipt may be stale."""
        same = [index for index, worker in enumerate(WORKERS) if worker == WORKERS[owner]]
        for delivery in self.latest(self.deliveries, position):
            call = self.bench.adopt(self.subscriptions[owner], delivery.receipt)
            (answer,), span = self.timed(call)
            self.model.adopted(owner, same, delivery, answer, span)
            self.done(f"{name_of(delivery)} {'adopted' if answer else 'not adopted'}")

    @precondition(lambda self: self.has(Capability.FLOW))
    @rule(key=keys, limits=st.fixed_dictionaries({}, optional=bounds | pauses))
    def limit(self, key: str, limits: dict[str, Any]) -> None:
        """Change some limits of a queue."""
        if patience := limits.get("max_processing_time"):
            limits = {**limits, "max_processing_time": patience * self.unit}
        settings, span = self.timed(self.bench.configure(key, **limits))
        self.model.configured(key, settings, span)
        self.done("in force")

    def supported(self, arranged: dict[str, Any]) -> dict[str, Any]:
        """Return those settings in ``arranged`` that the backend supports."""
        share, fair = self.has(Capability.FLOOR_SHARE), self.has(Capability.FAIR_ORDER)
        return {
            name: value
            for name, value in arranged.items()
            if (share if name == "floor_share" else fair)
        }

    @precondition(lambda self: self.has(Capability.FAIR_ORDER) or self.has(Capability.FLOOR_SHARE))
    @rule(key=keys, arranged=arrangements)
    def arrange(self, key: str, arranged: dict[str, Any]) -> None:
        """Change the order of a queue, and the settings that depend on it."""
        arranged = self.supported(arranged)
        settings, span = self.timed(self.bench.configure(key, **arranged))
        self.model.configured(key, settings, span)
        self.done("in force")

    @precondition(lambda self: self.has(Capability.CONTROL))
    @rule(index=places)
    def progress(self, index: int) -> None:
        """Report the progress of a delivery. Its receipt may be stale."""
        for delivery in self.latest(self.deliveries, index):
            answer, span = self.timed(self.bench.control.progress(delivery, 0.5))
            self.model.progressed(delivery, span, answer=answer)
            self.done(f"{name_of(delivery)} {'noted' if answer else 'not noted'}")

    @rule(units=st.integers(1, 7))
    def advance(self, units: int) -> None:
        """Advance the store's clock."""
        self.run(self.bench.advance(units * self.unit))
        self.done("")

    @precondition(lambda self: self.has(Capability.CONTROL))
    @rule(units=st.integers(0, 5))
    def maintain(self, units: int) -> None:
        """Advance the store's clock by 0 or more units, and run maintenance until it finds nothing to do."""
        if not self.model.entries:
            return
        self.run(self.bench.advance(units * self.unit))
        span = self.span()
        expired = 0
        for _ in range(10):
            done, (_, end) = self.timed(self.bench.control.maintain())
            expired += len(done.expired)
            self.model.expired(done.expired, (span[0], end))
            if not (done.promoted or done.expired or done.forgotten or done.recovered):
                break
        self.model.maintained(span)
        late = [entry.name for entry in self.model.entries.values() if entry.surely_late(span)]
        assert not late, f"maintenance did not expire {late} after their deadlines (law 8)"
        self.done(f"{expired} expired")


class MachineSuite(Harness):
    """Tests that random histories of two queues agree with the model."""

    def test_machine(self) -> None:
        """Random histories of calls and settings break no law (laws 1, 2, 3, 4, 5, 6, 7, 8, 9, 10; C26, D5)."""
        play(QueueMachine, self, 50)
