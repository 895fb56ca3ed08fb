"""The publisher of a backend on a `RecordStore`: stores new tasks and schedules retries."""

from __future__ import annotations

from taskqueue_core.authoring.helpers import answer, encodable, refusal, reject_ordering_keys
from taskqueue_core.errors import PublishUnconfirmed
from taskqueue_core.limits import check_time
from taskqueue_core.recordstore.notify import RecordRoomSignal
from taskqueue_core.recordstore.store import Record
from taskqueue_core.recordstore.transitions import Transitions
from taskqueue_core.tasks import Confirmation, Delivery, Published, Settled, State, Task


class RecordPublisher:
    """The publisher of a `RecordBackend`. Each call changes the store in one step."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        reject_ordering_keys(tasks)
        return await self._transitions.when_promoted(
            {task.key for task in tasks},
            lambda now: tuple([self._publish(task, now) for task in tasks]),
            PublishUnconfirmed,
        )

    def _publish(self, task: Task, now: float) -> Confirmation:
        transitions = self._transitions
        settings = transitions.store.settings(task.key)
        record = transitions.find(task.key, task.id, now)
        if record is not None:
            known = record.recognise(task, now, settings.dedupe_window)
            if known is not None:
                return _confirmation(task, known)
        if settings.capacity is not None or settings.intake_paused or settings.moved_to:
            refused = refusal(task, settings, transitions.store.counters(task.key)["fresh"])
            if refused is not None:
                return refused
        record = Record(task=task, at=task.not_before or now)
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
            if record.ended:  # then the retry creates a new entry of the same task
                record.task, record.state = task, None
            record.retry(used, encodable(error), now)
            record.at = at
            self._transitions.store.count(task.key, "retried")
            self._transitions.move(record, State.SCHEDULED, now)
        return _confirmation(task, Published.ACCEPTED)


def _confirmation(task: Task, status: Published) -> Confirmation:
    return Confirmation(key=task.key, task_id=task.id, status=status)
