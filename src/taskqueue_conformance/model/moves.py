"""Helper methods that the rules of the queue state machine share."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from hypothesis import note

from taskqueue_conformance.histories import BackendMachine
from taskqueue_conformance.model.draws import KEYS
from taskqueue_conformance.model.entries import Entry, Span
from taskqueue_conformance.model.model import Model
from taskqueue_conformance.model.schedules import Schedules
from taskqueue_conformance.partitions import carry_all
from taskqueue_core.after import After, TaskRef
from taskqueue_core.backend import Capability, Subscription
from taskqueue_core.capabilities import QueueSettings, has
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import Delivery, Ledger, Published, Settled, State, Task, TaskStatus
from taskqueue_core.uniqueness import Debounce, UniqueKey

T = TypeVar("T")

_WINDOW = 6
_MAX_LOSSES = 2


class Moves(BackendMachine):
    """The base class of the queue state machine: a backend, its model, and methods that compare the two."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = self.bench.short / 2
        self.slack = 0.0 if self.harness.manual_clock else self.unit / 5
        self.subscriptions: list[Subscription] = []
        self.deliveries: list[Delivery] = []
        self.model = Model(None)
        self.schedules = Schedules()
        self.encoded = 2
        """number in the payload of the last task that was published with a digest"""

    async def prepare(self) -> QueueSettings | None:
        """Configure a short dedupe window and a low ``max_losses``; return the settings.

        Return ``None`` if the backend lacks ``control``.
        """
        if not self.has(Capability.CONTROL):
            return None
        chosen = QueueSettings(max_losses=_MAX_LOSSES, dedupe_window=_WINDOW * self.unit)
        for key in KEYS:
            await self.bench.control.configure(key, chosen)
        return chosen

    def made(self, key: str, name: str, fields: dict[str, Any]) -> Task:
        """Return a task with random fields, apart from those that the backend does not support."""
        chosen = {field: fields[field] for field in ("payload", "priority", "tenant")}
        chosen |= {field: self.at(fields[field]) for field in ("not_before", "deadline")}
        if self.has(Capability.ORDERING_KEYS):
            chosen["ordering_key"] = fields["ordering_key"]
        if digest := fields.get("digest"):  # such a payload differs each time
            self.encoded += 1
            chosen |= {"payload": self.encoded, "content_digest": bytes([digest]) * 16}
        if (unique := fields.get("unique")) and self.has(Capability.UNIQUE):
            chosen |= self._unique(unique, chosen)
        if self.has(Capability.AFTER):
            after = fields.get("after")
            chosen["after"] = after and self._after(after, TaskRef(key, name))
            chosen["batch"] = fields.get("batch")
        return self.bench.task(name, key=key, **chosen)

    def _unique(self, fields: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a task with a unique key."""
        period, debounce = fields["period"], fields["debounce"]
        values = {**fields, "period": period and period * self.unit, "debounce": None}
        if self.slack:  # with a store's own clock, it is not known which of two times comes first
            values["on_conflict"] = "keep"
        elif debounce and fields["on_conflict"] == "replace":
            seconds, most = debounce
            values["debounce"] = Debounce(seconds * self.unit, most and most * self.unit)
            task = {**task, "not_before": None, "ordering_key": None}
        times = {field: task.get(field) for field in ("not_before", "ordering_key")}
        return {**times, "unique": UniqueKey(**values)}

    def _after(self, fields: dict[str, Any], ref: TaskRef) -> After | None:
        """Return what a task waits for, without itself and without parents that may be forgotten by now."""
        span = self.span()
        parents = tuple(
            parent
            for parent in fields["tasks"]
            if parent != ref
            and (
                (entry := self.model.entries.get((parent.key, parent.task_id))) is None
                or self.model.surely_known(entry, span)
            )
        )
        inputs = tuple(reversed(range(len(parents)))) if fields["inputs"] else ()
        options = {**fields, "tasks": parents, "inputs": inputs}
        return After(**options) if parents else None

    def settle(
        self,
        verb: str,
        chosen: Sequence[Delivery],
        call: Coroutine[Any, Any, tuple[Settled, ...]],
        *,
        foreign: bool = False,
        results: Sequence[bytes | None] = (),
    ) -> None:
        """Settle deliveries, and compare the answers with the model.

        ``foreign``: the caller does not own the deliveries; ``results``: one per delivery, in an ack.
        """
        start, _ = self.span()
        try:
            answers = self.run(call)
        except LeaseLost:
            answers = (Settled.LEASE_LOST,)
            assert len(chosen) == 1, "a batch must answer for each receipt, and not raise (law 2)"
        else:
            assert answers != (Settled.LEASE_LOST,), (
                "a single stale receipt must raise LeaseLost (law 2)"
            )
        span = start, self.span()[1]
        given = results or [None] * len(chosen)
        for delivery, answer, result in zip(chosen, answers, given, strict=True):
            self.model.settled(verb, delivery, answer, span, foreign=foreign, result=result)
        pairs = zip(chosen, answers, strict=True)
        self.done(", ".join(f"{name_of(delivery)} {answer}" for delivery, answer in pairs))

    def schedule(
        self,
        task: Task,
        delay: int,
        token: str | None,
        settles: Delivery | None,
        *,
        free: bool,
    ) -> None:
        """Schedule a retry, and compare the answer with the model."""
        publisher, at = self.bench.backend.publisher, self.bench.now + delay * self.unit
        answer: Published | None = None
        start, _ = self.span()
        try:
            call = publisher.schedule_retry(
                task, at, error="failed", token=token, settles=settles, free=free
            )
            answer = self.run(call).status
        except LeaseLost:
            assert settles is not None, "LeaseLost was raised although no delivery was given"
        span = (start, self.span()[1])
        self.model.retried(task, at, answer, span, token=token, settles=settles, free=free)
        about = name_of(settles) if settles else f"{task.key}/{task.id}"
        self.done(f"{about} {answer or 'lease_lost'}")

    def the_dead(self, key: str, chosen: Sequence[str], moved: int) -> list[Entry]:
        """Return the dead letters ``chosen``, or all if none is chosen; fail unless their number is ``moved``."""
        entries = [self.model.entries.get((key, name)) for name in chosen]
        if not chosen:
            entries = [entry for entry in self.model.entries.values() if entry.task.key == key]
        dead = [entry for entry in entries if entry is not None and entry.state is State.DEAD]
        assert moved == len(dead), (
            f"wrong number of dead letters: expected {len(dead)}, got {moved} (law 1)"
        )
        return dead

    def any(self, *states: State) -> bool:
        """Return whether any entry is in one of ``states``."""
        return any(entry.state in states for entry in self.model.entries.values())

    def done(self, answer: str) -> None:
        """Add a call's answer to the printed history, and compare the store's ledgers and statuses with the model."""
        note(f"# {self.bench.now:.3f}: {answer}")
        start, _ = self.span()
        self.carry()
        if not self.has(Capability.CONTROL):
            return
        reports = self.read(start)
        while self.model.news:  # an end that was noticed only now, of which others must learn
            self.carry()
            reports = self.read(start)
        for key, (ledger, statuses) in reports.items():
            self.model.check(key, ledger, statuses, (start, self.span()[1]))

    def read(self, start: float) -> dict[str, tuple[Ledger, dict[str, TaskStatus | None]]]:
        """Return the report of each queue, from which the model has learned which tasks have ended."""
        reports = {key: self.report(key) for key in KEYS}
        for key, (_, statuses) in reports.items():
            self.model.read(key, statuses, (start, self.span()[1]))
        return reports

    def report(self, key: str) -> tuple[Ledger, dict[str, TaskStatus | None]]:
        """Return the ledger of a queue, and then the statuses of its tasks."""
        known = [task_id for queue, task_id in self.model.entries if queue == key]
        ledger = self.run(self.bench.control.ledger(key))
        statuses = self.run(self.bench.control.statuses(key, *known))
        return ledger, dict(zip(known, statuses, strict=True))

    def carry(self) -> None:
        """Carry all lines between the partitions, if there may be some."""
        if self.model.blocked:
            start, _ = self.span()
            self.run(carry_all(self.bench))
            self.model.carried((start, self.span()[1]))

    def at(self, units: int | None) -> float | None:
        """Return the time on the store's clock ``units`` from now; ``None`` if ``units`` is ``None``."""
        return None if units is None else self.bench.now + units * self.unit

    def has(self, capability: Capability) -> bool:
        """Return whether the backend declares ``capability``."""
        return has(self.bench.backend, capability)

    def span(self) -> Span:
        """Return the current time on the store's clock as a span, widened by the imprecision of a real clock."""
        now = self.bench.now
        return now - self.slack, now + self.slack

    def timed(self, call: Coroutine[Any, Any, T]) -> tuple[T, Span]:
        """Run a call; return its answer, and the times on the store's clock before and after the call."""
        start, _ = self.span()
        answer = self.run(call)
        return answer, (start, self.span()[1])


def name_of(delivery: Delivery) -> str:
    """Return the task and the attempt of a delivery, for messages."""
    return f"{delivery.task.key}/{delivery.task.id} attempt {delivery.attempt}"
