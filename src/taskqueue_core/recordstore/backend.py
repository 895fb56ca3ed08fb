"""A backend on a `RecordStore`, and its publisher."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from taskqueue_core.authoring.entries import held_by, meet
from taskqueue_core.authoring.helpers import (
    answer,
    check_size,
    encodable,
    refusal,
)
from taskqueue_core.authoring.unsupported import reject_ordering_keys
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import Durability
from taskqueue_core.clock import Clock
from taskqueue_core.errors import PublishUnconfirmed, TaskQueueError
from taskqueue_core.limits import check_time
from taskqueue_core.recordstore.audit import RecordAudit
from taskqueue_core.recordstore.control import RecordControl, RecordDeadLetters
from taskqueue_core.recordstore.dependencies import RecordDependencies
from taskqueue_core.recordstore.listing import RecordListing
from taskqueue_core.recordstore.notify import RecordRoomSignal
from taskqueue_core.recordstore.schedules import RecordSchedules
from taskqueue_core.recordstore.store import Record, RecordStore
from taskqueue_core.recordstore.streams import RecordStreams
from taskqueue_core.recordstore.subscription import RecordSubscription
from taskqueue_core.recordstore.transitions import STEP, Transitions
from taskqueue_core.tasks import Confirmation, Delivery, Health, Published, Settled, Task


class RecordPublisher:
    """The publisher of a `RecordBackend`. Each call takes effect in one atomic step, or in several for many parents."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        check_size("tasks", tasks)
        reject_ordering_keys(tasks)
        answers: list[Confirmation] = []
        for part in _parts(tasks):
            keys = {task.key for task in part}
            step = partial(self._publish, part)
            answers += await self._transitions.when_promoted(keys, step, PublishUnconfirmed)
        return tuple(answers)

    def _publish(self, tasks: Sequence[Task], now: float) -> list[Confirmation]:
        return [self.publish_one(task, now) for task in tasks]

    def publish_one(self, task: Task, now: float) -> Confirmation:
        """Publish a task within a step."""
        transitions = self._transitions
        settings = transitions.store.settings(task.key)
        former = transitions.store.load(task.key, task.id)
        answer = None
        if former is not None and not former.is_over(now):
            answer = _known(task, former, settings.dedupe_window, now)
        answer = answer or transitions.links.batches.refused(task) or self._held(task, former, now)
        if answer is not None:
            return answer
        if settings.capacity is not None or settings.intake_paused or settings.moved_to:
            refused = refusal(task, settings, transitions.store.counters(task.key)["fresh"])
            if refused is not None:
                return refused
        due = (
            task.not_before
            if task.unique is None
            else task.unique.due_at(task.not_before, now, now)
        )
        record = Record(task=task, at=due or now, published_at=now)
        transitions.begin(record, now, former)
        return _confirmation(task, Published.ACCEPTED)

    def _held(self, task: Task, former: Record | None, now: float) -> Confirmation | None:
        """Return the answer to the publish of a task whose unique key is held, after a replacement."""
        if task.unique is None:
            return None
        holders = self._transitions.store.sharing(task.key, task.unique.key, STEP)
        found = meet(task, holders, now)
        if isinstance(found, Record):
            self._transitions.replace(found, task, now, former)
            return held_by(task, Published.REPLACED, found.task.id)
        return found

    def room_signal(self, *keys: str) -> RecordRoomSignal:
        return RecordRoomSignal(self._transitions.signals, keys)

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
        free: bool = False,
        traceback: str | None = None,
    ) -> Confirmation:
        check_time("at", at)
        with self._transitions.step() as now:
            former = self._transitions.store.load(task.key, task.id)
            record = Record(task=task) if former is None or former.is_over(now) else former
            used = record.retry_token(encodable(token), settles)
            if used in record.tokens:
                return _confirmation(task, Published.DUPLICATE)
            if settles is not None:
                if record.receipt != settles.receipt:
                    answer([Settled.LEASE_LOST])
                record.settle("retry")
            if former is not None and former.ended:
                self._transitions.clear(former)
            if record.ended:  # the retry of an ended task creates a new entry
                record.task, record.state, record.digest, record.replaced = task, None, None, None
                record.wait, record.linked = None, False
            if record.state is None:
                record.published_at = now
                self._transitions.index(record)
                self._transitions.links.batches.begin(record, now)
            record.retry(used, encodable(error), now, traceback=traceback, free=free)
            self._transitions.store.count(task.key, "retried")
            self._transitions.schedule(record, at, now)
        return _confirmation(task, Published.ACCEPTED)


def _known(task: Task, record: Record, window: float, now: float) -> Confirmation | None:
    """Return the answer to the publish of an id that has a record; ``None`` if the id may be used again."""
    known = record.recognise(task, now, window)
    if known is Published.REPLACED and record.replaced is not None:
        return held_by(task, known, record.replaced)
    return None if known is None else _confirmation(task, known)


def _confirmation(task: Task, status: Published) -> Confirmation:
    return Confirmation(key=task.key, task_id=task.id, status=status)


def _parts(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    """Divide tasks so that one step looks at a limited number of parents."""
    start = parents = 0
    for place, task in enumerate(tasks):
        if parents >= STEP:
            yield tasks[start:place]
            start, parents = place, 0
        parents += 0 if task.after is None else len(task.after.tasks)
    yield tasks[start:]


class RecordBackend:
    """A backend on a `RecordStore`, with the capabilities that do not concern order, several processes or endpoints.

    The first call that uses the store opens it. ``durable`` means that confirmed tasks survive the end of the process
    and a power failure; if it is set, queue settings may require any durability up to `Durability.DISK`.
    """

    def __init__(self, name: str, store: RecordStore, clock: Clock, *, durable: bool) -> None:
        self.capabilities = Capabilities(
            names=frozenset(
                {
                    Capability.DEAD_LETTERS,
                    Capability.CONTROL,
                    Capability.FLOW,
                    Capability.UNIQUE,
                    Capability.AUDIT,
                    Capability.SCHEDULES,
                    Capability.AFTER,
                    Capability.LISTING,
                    Capability.STREAMS,
                }
            ),
            durable=durable,
        )
        self._name = name
        self._transitions = Transitions(store, clock)
        self.publisher = RecordPublisher(self._transitions)
        self.dead_letters = RecordDeadLetters(self._transitions)
        self.dependencies = RecordDependencies(self._transitions)
        self.audit = RecordAudit(self._transitions)
        self.listing = RecordListing(self._transitions)
        self.streams = RecordStreams(self._transitions)
        self.schedules = RecordSchedules(self._transitions, self.publisher.publish_one)
        durabilities = {Durability.MEMORY, Durability.PROCESS, Durability.DISK}
        self.control = RecordControl(
            self._transitions, durabilities if durable else {Durability.MEMORY}
        )

    def subscribe(self, keys: Iterable[str], consumer: str) -> RecordSubscription:
        self._transitions.ensure_open()
        return RecordSubscription(self._transitions, keys, consumer)

    def now(self) -> float:
        """Return the time of this process, which is also the store's time."""
        return self._transitions.clock.now()

    async def health(self) -> Health:
        """Check whether the store works, and open it if necessary. Errors are reported in ``details``, not raised."""
        try:
            with self._transitions.step():
                return Health(ok=True, backend=self._name)
        except TaskQueueError as error:
            return Health(ok=False, backend=self._name, details={"error": str(error)})

    async def aclose(self) -> None:
        """Close all subscriptions, then the store. If this raises an exception, the store stays open; try again."""
        for subscription in self._transitions.subscriptions.all:
            await subscription.close()
        self._transitions.close()
