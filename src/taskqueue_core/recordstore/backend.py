"""A backend on a `RecordStore`, and its publisher."""

from __future__ import annotations

from collections.abc import Iterable

from taskqueue_core.authoring.entries import held_by, meet
from taskqueue_core.authoring.helpers import (
    answer,
    check_size,
    encodable,
    refusal,
    reject_after,
    reject_ordering_keys,
)
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.capabilities import Durability
from taskqueue_core.clock import Clock
from taskqueue_core.errors import PublishUnconfirmed, TaskQueueError
from taskqueue_core.limits import check_time
from taskqueue_core.recordstore.control import RecordControl, RecordDeadLetters
from taskqueue_core.recordstore.notify import RecordRoomSignal
from taskqueue_core.recordstore.schedules import RecordSchedules
from taskqueue_core.recordstore.store import Record, RecordStore
from taskqueue_core.recordstore.subscription import RecordSubscription
from taskqueue_core.recordstore.transitions import STEP, Transitions
from taskqueue_core.tasks import Confirmation, Delivery, Health, Published, Settled, State, Task


class RecordPublisher:
    """The publisher of a `RecordBackend`. Each call takes effect in one atomic step."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        check_size("tasks", tasks)
        reject_ordering_keys(tasks)
        reject_after(tasks)
        return await self._transitions.when_promoted(
            {task.key for task in tasks},
            lambda now: tuple([self.publish_one(task, now) for task in tasks]),
            PublishUnconfirmed,
        )

    def publish_one(self, task: Task, now: float) -> Confirmation:
        """Publish a task within a step."""
        transitions = self._transitions
        settings = transitions.store.settings(task.key)
        record = transitions.find(task.key, task.id, now)
        if record and (known := record.recognise(task, now, settings.dedupe_window)):
            if record.replaced is not None:
                return held_by(task, known, record.replaced)
            return _confirmation(task, known)
        if task.unique is not None:
            found = meet(task, transitions.store.sharing(task.key, task.unique.key, STEP), now)
            if isinstance(found, Record):
                transitions.replace(found, task, now)
                return held_by(task, Published.REPLACED, found.task.id)
            if found is not None:
                return found
        if settings.capacity is not None or settings.intake_paused or settings.moved_to:
            refused = refusal(task, settings, transitions.store.counters(task.key)["fresh"])
            if refused is not None:
                return refused
        due = (
            task.not_before
            if task.unique is None
            else task.unique.due_at(task.not_before, now, now)
        )
        record = Record(task=task, at=due or now, published_at=now if task.unique else 0.0)
        transitions.move(record, State.SCHEDULED if record.at > now else State.WAITING, now)
        return _confirmation(task, Published.ACCEPTED)

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
            record = self._transitions.find(task.key, task.id, now) or Record(task=task)
            used = record.retry_token(encodable(token), settles)
            if used in record.tokens:
                return _confirmation(task, Published.DUPLICATE)
            if settles is not None:
                if record.receipt != settles.receipt:
                    answer([Settled.LEASE_LOST])
                record.settle("retry")
            if record.ended:  # the retry of an ended task creates a new entry
                record.task, record.state, record.digest, record.replaced = task, None, None, None
            if record.state is None:
                record.published_at = now
            record.retry(used, encodable(error), now, traceback=traceback, free=free)
            record.at = at
            self._transitions.store.count(task.key, "retried")
            self._transitions.move(record, State.SCHEDULED, now)
        return _confirmation(task, Published.ACCEPTED)


def _confirmation(task: Task, status: Published) -> Confirmation:
    return Confirmation(key=task.key, task_id=task.id, status=status)


class RecordBackend:
    """A backend on a `RecordStore`, with ``dead_letters``, ``control``, ``flow``, ``unique`` and ``schedules``.

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
                    Capability.SCHEDULES,
                }
            ),
            durable=durable,
        )
        self._name = name
        self._transitions = Transitions(store, clock)
        self.publisher = RecordPublisher(self._transitions)
        self.dead_letters = RecordDeadLetters(self._transitions)
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
