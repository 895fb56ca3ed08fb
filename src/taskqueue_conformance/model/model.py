"""A model of a backend in plain dictionaries. The state machine compares real backends with it.

The model predicts nothing. Each method takes an answer of the backend, fails if no correct backend could give this
answer, and records the consequences. ``span`` holds the times on the store's clock before and after the call. An event
that is due in between may count as before or after the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from taskqueue_conformance.model.entries import Entry, Span
from taskqueue_conformance.model.shelf import Shelf
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Expired,
    Ledger,
    Published,
    Received,
    Settled,
    State,
    Task,
    TaskStatus,
)


class Model(Shelf):
    """Every task that was published, and the final states of earlier entries of the same tasks."""

    def __init__(self, settings: QueueSettings | None) -> None:
        """Create a model without entries. ``settings`` apply to all queues; ``None`` if the settings are unknown."""
        super().__init__()
        self.owners: dict[str, int] = {}
        self._settings = settings
        window = None if settings is None else settings.dedupe_window
        self._window = (0.0, float("inf")) if window is None else (window, window)
        self._past: dict[str, Counter[State]] = {}
        self._issued: set[str] = set()
        self._numbers = 0

    def published(self, task: Task, answer: Confirmation, span: Span) -> None:
        """Record the answer to a publish of ``task``."""
        entry = self.entries.get((task.key, task.id))
        limits = self.limits[task.key]
        waiting = self.waiting(task, span), self.waiting(task, span, of_tenant=True)
        allowed = set()
        if entry is None or entry.maybe_forgotten(span, self._window):
            allowed |= limits.answers(*waiting)
        if entry is not None and not entry.surely_forgotten(span, self._window):
            same = entry.task.payload == task.payload
            allowed.add(Published.DUPLICATE if same else Published.CONFLICT)
        assert answer.status in allowed, (
            f"publish answered {answer.status}, allowed: {allowed} (laws 6, 7)"
        )
        if answer.status is Published.REFUSED:
            limits.check_refusal(answer, *waiting)
        if answer.status is Published.ACCEPTED:
            fresh = self._renew(task, life=True)
            fresh.fresh = True
            if task.not_before is not None and task.not_before > span[0]:
                fresh.schedule(task.not_before, span, self._number())
            else:
                fresh.offer(span, self._number())

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
                entry = self._renew(task, life=False)
                entry.attempt = entry.attempt if known else None
            elif entry.maybe_available(span):
                entry.holds = entry.holds or None
                self.turns[task.key].reset()
            self._end_receipt(entry, "retry" if settles else None)
            if free and not dead:
                entry.priors = {prior + 1 for prior in entry.priors}
            entry.tokens.add(name)
            entry.attempt = None if entry.attempt is None else entry.attempt + 1
            entry.losses, entry.fresh = 0, False
            entry.schedule(at, span, self._number())

    def rescheduled(self, key: str, name: str, at: float, span: Span, *, answer: bool) -> None:
        """Record the answer to ``reschedule``."""
        entry = self.entries.get((key, name))
        if entry is None:
            assert not answer, f"{key}/{name} was rescheduled, but was never published (law 7)"
            return
        at_rest = entry.state in (State.WAITING, State.SCHEDULED)
        movable = at_rest and entry.handed != entry.attempt
        assert answer is movable or (not answer and entry.maybe_late(span)), (
            f"reschedule of {entry.name} answered {answer}, expected {movable} (law 3)"
        )
        if answer:
            if entry.maybe_available(span):
                self.turns[key].reset()
            entry.schedule(at, span, self._number())

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
        assert entry is not None, f"{delivery.task.id} was never published (law 7)"
        at = delivery.delivered_at
        if entry.maybe_hung(span):  # this receive may have ended the overdue delivery first
            self._lose(entry, span)
        assert entry.maybe_available(span), (
            f"{entry.name} is {entry.state}, but was delivered (laws 2, 8)"
        )
        assert at >= entry.due, f"{entry.name} was delivered before its time (law 8)"
        deadline = entry.task.deadline
        assert deadline is None or at < deadline, (
            f"{entry.name} was delivered after its deadline (law 8)"
        )
        assert delivery.task == entry.task, f"{entry.name} was not delivered as it was published"
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
        self, verb: str, delivery: Delivery, answer: Settled, span: Span, *, foreign: bool = False
    ) -> None:
        """Record a settlement; with ``foreign``, the caller does not own the delivery."""
        entry = None if foreign else self._held(delivery)
        if entry is None:
            self._settled_before(verb, delivery, answer, span)
            return
        if answer is Settled.LEASE_LOST:
            assert entry.maybe_late(span), f"{entry.name}: a current receipt was refused (law 2)"
            self._end(entry, State.EXPIRED, span, None)
            entry.owed = True
        elif verb == "ack":
            assert answer is Settled.OK, f"ack answered {answer}"
            self._end(entry, State.DONE, span, verb)
        elif verb == "dead_letter":
            self._end(entry, State.DEAD, span, verb)
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
                self._end(entry, State.DEAD, span, verb)
            else:
                self._release(entry, verb)

    def _settled_before(self, verb: str, delivery: Delivery, answer: Settled, span: Span) -> None:
        entry = self.entries[delivery.task.key, delivery.task.id]
        this = (delivery.receipt, verb)
        if this not in entry.settled:
            assert not answer.ok, (
                f"{verb} on a stale or foreign receipt of {entry.name} answered {answer} (law 2)"
            )
        elif entry.settled[-1] == this and not entry.maybe_forgotten(span, self._window):
            assert answer.ok, (
                f"the same {verb} of {entry.name}, sent again, answered {answer} (law 2)"
            )

    def closed(self, owner: int) -> None:
        """Record that a subscription was closed, which releases its deliveries."""
        for entry in self.entries.values():
            if entry.receipt is not None and self.owners[entry.receipt] == owner:
                self._release(entry, "redeliver")
                entry.settled.append(("", ""))

    def redriven(self, entries: Iterable[Entry], span: Span) -> None:
        """Record that dead letters were redriven in one call; the contract promises no order among them."""
        number = self._number()
        for entry in entries:
            spent = entry.attempt or 0
            entry.priors = {spent, spent - 1}
            entry.losses = 0
            entry.offer(span, number)

    def ended(self, entry: Entry, state: State, span: Span) -> None:
        """Record that an entry was cancelled or discarded."""
        self._end(entry, state, span, None)

    def expired(self, reports: Iterable[Expired], span: Span) -> None:
        """Record the entries that were reported as expired."""
        for report in reports:
            entry = self.entries.get((report.key, report.task_id))
            assert entry is not None, f"{report} was never published"
            assert entry.owed or entry.maybe_late(span), (
                f"{entry.name} is {entry.state}, but was reported as expired"
            )
            if not entry.owed:
                entry.loose = entry.maybe_hung(span)
                self._end(entry, State.EXPIRED, span, None)
            entry.owed = False

    def configured(self, key: str, settings: QueueSettings, span: Span) -> None:
        """Record new settings of a queue."""
        limits = self.limits[key]
        if limits.settings.order is not settings.order:
            for entry in self.entries.values():
                entry.uncounted |= entry.task.key == key and entry.state is not State.WAITING
        limits.configured(settings, span)
        self.turns[key].reset()

    def maintained(self, span: Span) -> None:
        """Record that maintenance was run to completion, and ended every delivery that exceeded its processing time."""
        for entry in self.entries.values():
            if entry.surely_hung(span):
                self._lose(entry, span)

    def check(
        self, key: str, ledger: Ledger, matches: dict[str, TaskStatus | None], span: Span
    ) -> None:
        """Compare a queue's ledger and its tasks' statuses with the model. The ledger was read before the statuses."""
        counts: Counter[str] = Counter(
            {state.value: n for state, n in self._past.get(key, Counter()).items()}
        )
        for (queue, task_id), entry in self.entries.items():
            if queue == key:
                status = matches[task_id]
                if status is None:
                    assert entry.maybe_forgotten(span, self._window), (
                        f"{entry.name} was forgotten too early (law 1)"
                    )
                else:
                    if entry.maybe_hung(span) and status.state in (State.WAITING, State.DEAD):
                        self._lose(entry, span)
                    entry.check(status, span)
                counts[(status.state if status else entry.state).value] += 1
        counts["published"] = counts.total()
        assert ledger == Ledger(**counts), (
            f"wrong ledger: expected {dict(counts)}, got {ledger} (law 1)"
        )

    def surely_known(self, entry: Entry, span: Span) -> bool:
        """Return whether every correct store still knows the task."""
        return not entry.maybe_forgotten(span, self._window)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _renew(self, task: Task, *, life: bool) -> Entry:
        old = self.entries.get((task.key, task.id))
        entry = Entry(task)
        if old is not None:
            self._past.setdefault(task.key, Counter())[old.state] += 1
            entry.inherit(old, life=life)
        self.entries[task.key, task.id] = entry
        return entry

    def _held(self, delivery: Delivery) -> Entry | None:
        entry = self.entries.get((delivery.task.key, delivery.task.id))
        return entry if entry is not None and entry.receipt == delivery.receipt else None

    def _release(self, entry: Entry, verb: str) -> None:
        self._end_receipt(entry, verb)
        entry.state, entry.returned, entry.uncounted = State.WAITING, True, False

    def _lose(self, entry: Entry, span: Span) -> None:
        """Record that a delivery exceeded its processing time, and was ended and counted as lost."""
        entry.losses += 1
        entry.settled.append(("", ""))
        if self._settings is not None and entry.losses > self._settings.max_losses:
            self._end(entry, State.DEAD, span, None)
        else:
            self._end_receipt(entry, None)
            self._release(entry, "")

    def _end(self, entry: Entry, state: State, span: Span, verb: str | None) -> None:
        self._end_receipt(entry, verb)
        start = min(span[0], entry.task.deadline or span[0]) if state is State.EXPIRED else span[0]
        if entry.state is not State.IN_FLIGHT:
            self.turns[entry.task.key].reset()
        entry.state, entry.end, entry.holds = state, (start, span[1]), False

    def _end_receipt(self, entry: Entry, verb: str | None) -> None:
        if entry.receipt is not None and verb is not None:
            entry.settled.append((entry.receipt, verb))
        entry.receipt = None
