"""A model of a backend in plain dictionaries. The state machine compares real backends with it.

The model predicts nothing. Each method takes an answer of the backend, fails if no correct backend could give this
answer, and records the consequences. ``span`` holds the times on the store's clock before and after the call. An event
that is due in between may count as before or after the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from taskqueue_conformance.model.batches import is_batch
from taskqueue_conformance.model.entries import Entry, Span
from taskqueue_conformance.model.unique_keys import Answer
from taskqueue_conformance.model.upkeep import Upkeep
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Published,
    Received,
    Refusal,
    Settled,
    State,
    Task,
)


class Model(Upkeep):
    """Every task that was published, and the final states of earlier entries of the same tasks."""

    def __init__(self, settings: QueueSettings | None) -> None:
        """Create a model without entries. ``settings`` apply to all queues; ``None`` if the settings are unknown."""
        super().__init__(settings)
        self.owners: dict[str, int] = {}
        self._issued: set[str] = set()

    def published(self, task: Task, answer: Confirmation, span: Span) -> None:
        """Record the answer to a publish of ``task``."""
        limits = self.limits[task.key]
        waiting = self.waiting(task, span), self.waiting(task, span, of_tenant=True)
        given = Answer.of(answer)
        known, unknown = self.of_the_id(task, span, self.window)
        held, stored = self.of_the_key(task, span) if unknown else (set[Answer](), False)
        new = {Answer(status) for status in limits.answers(*waiting)} if stored else set[Answer]()
        if unknown and self.batches.refuses(task):
            held, new = {Answer(Published.REFUSED, code=Refusal.BATCH_CLOSED)}, set()
        assert given in known | held | new, (
            f"publish answered {given}, allowed: {known | held | new} (laws 6, 7)"
        )
        if given in known:
            return
        if given == Answer(Published.REFUSED):
            limits.check_refusal(answer, *waiting)
        if answer.status is Published.REPLACED:
            self.replaced(task, answer.existing_id or "", span)
        if answer.status is Published.ACCEPTED:
            self._store(task, span)

    def _store(self, task: Task, span: Span) -> None:
        fresh = self.renew(task, life=True)
        fresh.fresh, fresh.stored = True, span
        at = self.due_of(task, span[0], span[0])
        if task.after is not None or is_batch(task):
            self.begin_wait(fresh, at, span)
        elif at > span[0]:
            fresh.schedule(at, span, self.number())
        else:
            fresh.offer(span, self.number())

    def retried(
        self,
        task: Task,
        at: float,
        answer: Published | None,
        span: Span,
        *,
        token: str | None,
        settles: Delivery | None,
        free: bool,
    ) -> None:
        """Record the answer to ``schedule_retry``; ``None`` means that it raised `LeaseLost`."""
        entry = self.entries.get((task.key, task.id))
        name = token or f"attempt:{settles.attempt if settles else entry.handed if entry else 0}"
        stale = settles is not None and (entry is None or entry.receipt != settles.receipt)
        allowed: set[Published | None] = {None if stale else Published.ACCEPTED}
        if entry is not None and name in entry.tokens:
            allowed = {Published.DUPLICATE}
        if stale and entry is not None and not self.surely_known(entry, span):
            allowed.add(None)
        if settles is not None and entry is not None and entry.maybe_late(span):
            allowed.add(None)
        assert answer in allowed, (
            f"schedule_retry answered {answer}, allowed: {allowed} (laws 2, 7)"
        )
        if answer is Published.ACCEPTED:
            dead = entry is not None and entry.state is State.DEAD
            if entry is not None and dead:
                entry.priors = {entry.attempt or 0}
            elif entry is None or not entry.state.live:
                known = entry is not None
                entry = self.renew(task, life=False)
                entry.attempt, entry.stored = entry.attempt if known else None, span
            elif entry.maybe_available(span):
                entry.holds = entry.holds or None
                self.turns[task.key].reset()
            self.end_receipt(entry, "retry" if settles else None)
            if free and not dead:
                entry.priors = {prior + 1 for prior in entry.priors}
            entry.tokens.add(name)
            entry.attempt = None if entry.attempt is None else entry.attempt + 1
            entry.losses, entry.fresh = 0, False
            entry.schedule(at, span, self.number())
            if dead:
                self.tell(entry, span)

    def rescheduled(self, key: str, name: str, at: float, span: Span, *, answer: bool) -> None:
        """Record the answer to ``reschedule``."""
        entry = self.entries.get((key, name))
        if entry is None:
            assert not answer, f"{key}/{name} was rescheduled, but was never published (law 7)"
            return
        at_rest = entry.state in (State.WAITING, State.SCHEDULED, State.BLOCKED)
        movable = at_rest and entry.handed != entry.attempt
        assert answer is movable or (not answer and entry.maybe_late(span)), (
            f"reschedule of {entry.name} answered {answer}, expected {movable} (law 3)"
        )
        if answer:
            if entry.maybe_available(span):
                self.turns[key].reset()
            entry.schedule(at, span, self.number())

    def received(
        self, owner: int, keys: Iterable[str], limit: int, answer: Received, span: Span
    ) -> None:
        """Record the answer to a receive call of a subscription to ``keys``."""
        held_up = self.held_up_by(answer.expired, span)
        self.expired(answer.expired, span)
        assert len(answer.deliveries) <= limit, "a receive returned more deliveries than its limit"
        for delivery in answer.deliveries:
            assert delivery.task.key in keys, (
                "a task was delivered from a queue that is not subscribed to"
            )
            self._delivered(owner, delivery, span, held_up)
        entries = [entry for entry in self.entries.values() if entry.task.key in keys]
        if len(answer.deliveries) < limit and not answer.again:
            remaining = [
                entry.name
                for entry in entries
                if self.surely_free(entry, span) and self.opens_at(entry, span) is None
            ]
            assert not remaining, f"available tasks were not delivered: {remaining}"
        if not (answer.deliveries or answer.again):
            due = min((self.known_at(entry, span) for entry in entries), default=inf)
            value = answer.due_at
            assert due == inf or (value is not None and value <= due), (
                f"wrong due_at: expected at most {due}, got {value}"
            )

    def _delivered(
        self, owner: int, delivery: Delivery, span: Span, held_up: Sequence[Entry]
    ) -> None:
        entry = self.entries.get((delivery.task.key, delivery.task.id))
        assert entry is not None, (
            f"{delivery.task.key}/{delivery.task.id} was never published (law 7)"
        )
        at = delivery.delivered_at
        self._lose_the_hung(entry, span)
        assert entry.maybe_available(span), (
            f"{entry.name} is {entry.state}, but was delivered (laws 2, 8)"
        )
        assert at >= entry.due, f"{entry.name} was delivered before its time (law 8)"
        deadline = entry.task.deadline
        assert deadline is None or at < deadline, (
            f"{entry.name} was delivered after its deadline (law 8)"
        )
        assert delivery.task == entry.task, f"{entry.name} was not delivered as it was published"
        inputs = () if entry.wait is None else entry.wait.inputs
        assert delivery.inputs == inputs, (
            f"wrong inputs of {entry.name}: expected {inputs}, got {delivery.inputs}"
        )
        assert delivery.receipt not in self._issued, (
            f"{entry.name} got a receipt used before (law 2)"
        )
        entry.attempt = delivery.attempt if entry.attempt is None else entry.attempt
        results, true = (delivery.attempt, delivery.losses), (entry.attempt, entry.losses)
        assert results == true, (
            f"wrong (attempt, losses) of {entry.name}: expected {true}, got {results} (law 3)"
        )
        assert delivery.prior in entry.priors, (
            f"wrong prior of {entry.name}: got {delivery.prior} (law 3)"
        )
        self.check_order(entry, span, held_up)
        limits = self.limits[entry.task.key]
        running = [
            e for e in self.in_flight(entry.task) if not (e.maybe_late(span) or e.maybe_hung(span))
        ]
        own = [e for e in running if e.task.tenant == entry.task.tenant and not e.uncounted]
        limits.handed_out(entry.name, entry.task.tenant, at, len(running), len(own))
        self._issued.add(delivery.receipt)
        self.owners[delivery.receipt] = owner
        assert delivery.timeout == limits.settings.timeout, (
            f"wrong timeout of {entry.name}: expected {limits.settings.timeout}, got {delivery.timeout} (law 9)"
        )
        entry.deliver(delivery, limits.settings.max_processing_time)

    def _lose_the_hung(self, entry: Entry, span: Span) -> None:
        """Record what a call may have done before it delivered an entry: ended overdue deliveries."""
        if entry.state is State.BLOCKED and entry.wait is not None:
            for ref in tuple(entry.wait.missing):
                parent = self.entries.get((ref.key, ref.task_id))
                if parent is not None and parent.maybe_hung(span):
                    self.lose(parent, span)
        elif entry.maybe_hung(span):
            self.lose(entry, span)

    def adopted(
        self,
        owner: int,
        rivals: Sequence[int],
        delivery: Delivery,
        answer: Delivery | None,
        span: Span,
    ) -> None:
        """Record an adoption or its refusal; ``rivals`` are all subscriptions of the adopting worker."""
        entry = self._held(delivery)
        right = entry is not None and self.owners[delivery.receipt] in rivals
        if not (entry is not None and entry.maybe_late(span)):
            assert (answer is not None) is right, (
                f"adopt answered {answer}; the subscription may adopt the delivery: {right} (law 2)"
            )
        if answer is not None:
            assert (answer.task, answer.receipt, answer.attempt, answer.losses) == (
                delivery.task,
                delivery.receipt,
                delivery.attempt,
                delivery.losses,
            ), "the adopted delivery differs from the one that was delivered"
            self.owners[delivery.receipt] = owner

    def progressed(self, delivery: Delivery, span: Span, *, answer: bool) -> None:
        """Record a progress report; ``answer`` says whether the backend accepted the delivery's receipt."""
        entry = self._held(delivery)
        if entry is None or not entry.maybe_late(span):
            assert answer is (entry is not None), (
                f"progress answered {answer}; the receipt is current: {entry is not None} (law 2)"
            )
        if answer and entry is not None:
            entry.alive = span
            entry.patience = self.limits[entry.task.key].settings.max_processing_time

    def settled(
        self,
        verb: str,
        delivery: Delivery,
        answer: Settled,
        span: Span,
        *,
        foreign: bool = False,
        result: bytes | None = None,
    ) -> None:
        """Record a settlement; with ``foreign``, the caller does not own the delivery."""
        entry = None if foreign else self._held(delivery)
        if entry is None:
            self._settled_before(verb, delivery, answer, span)
            return
        if answer is Settled.LEASE_LOST:
            assert entry.maybe_late(span), f"{entry.name}: a current receipt was refused (law 2)"
            self.end(entry, State.EXPIRED, span)
            entry.owed = True
        elif verb == "ack":
            assert answer is Settled.OK, f"ack answered {answer}"
            entry.result = result
            self.end(entry, State.DONE, span, verb)
        elif verb == "dead_letter":
            self.end(entry, State.DEAD, span, verb)
        else:
            entry.losses += verb == "lost"
            limit = None if self._settings is None else self._settings.max_losses
            doomed = verb == "lost" and (
                answer is Settled.DEAD if limit is None else entry.losses > limit
            )
            assert (answer is Settled.DEAD) is doomed, (
                f"{verb} answered {answer} after {entry.losses} losses (law 3)"
            )
            if doomed:
                self.end(entry, State.DEAD, span, verb)
            else:
                self.release(entry, verb)

    def _settled_before(self, verb: str, delivery: Delivery, answer: Settled, span: Span) -> None:
        entry = self.entries.get((delivery.task.key, delivery.task.id))
        this = (delivery.receipt, verb)
        if entry is None or this not in entry.settled:
            assert not answer.ok, (
                f"{verb} on a stale or foreign receipt of {delivery.task.key}/{delivery.task.id} "
                f"answered {answer} (law 2)"
            )
        elif entry.settled[-1] == this and not entry.maybe_forgotten(span, self.window):
            assert answer.ok, (
                f"the same {verb} of {entry.name}, sent again, answered {answer} (law 2)"
            )

    def closed(self, owner: int) -> None:
        """Record that a subscription was closed, which releases its deliveries."""
        for entry in self.entries.values():
            if entry.receipt is not None and self.owners[entry.receipt] == owner:
                self.release(entry, "redeliver")
                entry.settled.append(("", ""))

    def redriven(self, entries: Iterable[Entry], span: Span) -> None:
        """Record that dead letters were redriven in one call; the contract promises no order among them."""
        number = self.number()
        for entry in entries:
            spent = entry.attempt or 0
            entry.priors = {spent, spent - 1}
            entry.losses = 0
            entry.offer(span, number)
            self.tell(entry, span)

    def ended(self, entry: Entry, state: State, span: Span) -> None:
        """Record that an entry was cancelled or discarded."""
        self.end(entry, state, span)

    def _held(self, delivery: Delivery) -> Entry | None:
        entry = self.entries.get((delivery.task.key, delivery.task.id))
        return entry if entry is not None and entry.receipt == delivery.receipt else None
