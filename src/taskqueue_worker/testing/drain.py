"""One drain: what it may run, and what it has run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from taskqueue_core.application.arguments import InvalidPayload
from taskqueue_core.application.errors import TaskFailed, Undecodable
from taskqueue_core.capabilities import Control, DeadLetters, Schedules
from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer.firing import fire_due
from taskqueue_core.retry import Failed, HandBack, Outcome, Rejected, RetryLater, Snoozed, Success
from taskqueue_core.tasks import Delivery, Expired, Task
from taskqueue_worker.batch_buffer import AnyDelivery
from taskqueue_worker.outcomes import INVALID_RESULT
from taskqueue_worker.testing.drained import Drained, End, NotIdle, Run, most_common
from taskqueue_worker.testing.published import name_of

_TAIL = 100
"""number of the last runs that the message of `NotIdle` counts"""
_ENDS: dict[type[Outcome], End] = {
    Success: End.DONE,
    Failed: End.FAILED,
    RetryLater: End.RETRY,
    Snoozed: End.SNOOZED,
    Rejected: End.REJECTED,
    HandBack: End.RELEASED,
}
_FAULTS = (InvalidPayload.code, INVALID_RESULT, Undecodable.code)
"""reasons of dead letters that the handler did not ask for"""


class Wait(msgspec.Struct, eq=False):
    """A wait for the end of a task."""

    since: asyncio.Event | None = None
    """the event `Drain.changed` when it last looked"""


class Drain:
    """One call of `TestQueue.drain` or `TestQueue.advance`."""

    def __init__(
        self,
        clock: ManualClock,
        deadlines: Sequence[float],
        schedules: Schedules,
        *,
        names: frozenset[str],
        until: float | None = None,
        until_idle: bool = True,
        deliver_twice: bool = False,
        limit: int,
    ) -> None:
        """Create a drain, which advances the clock up to ``until``; ``None``: not at all.

        ``deadlines`` are those of the published tasks; there may be more later. ``names`` are those of all tasks. The
        rest is as in `TestQueue.drain`.
        """
        self._names = names
        self.until_idle = until_idle
        self.ended = asyncio.Event()
        """set when the worker has ended"""
        self.changed = asyncio.Event()
        """set at the next change of what runs, or of the store; then there is a new event"""
        self.waits: list[Wait] = []
        """the waits of handlers for the ends of other tasks"""
        self._clock = clock
        self._deadlines = deadlines
        self._schedules = schedules
        self._until = until
        self._deliver_twice = deliver_twice
        self._limit = limit
        self._started = 0
        self._repeated: set[tuple[str, str]] = set()
        self._runs: list[Run] = []
        self._unsettled: dict[str, tuple[Task, int]] = {}
        """by receipt, the task and the position of a run that may have made a dead letter"""
        self._expired: list[Expired] = []
        self._errors: dict[str, BaseException] = {}
        self._error: NotIdle | None = None

    def result(self) -> Drained:
        """Return what was run. Raises `NotIdle`."""
        if self._error is not None:
            raise self._error
        return Drained(names=self._names, runs=tuple(self._runs), expired=tuple(self._expired))

    def notify(self) -> None:
        """Set the event `changed`."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    @contextmanager
    def waiting(self) -> Iterator[Wait]:
        """Note that code of the worker waits for the end of a task."""
        wait = Wait()
        self.waits.append(wait)
        try:
            yield wait
        finally:
            self.waits.remove(wait)

    def note_stuck(self, names: Iterable[str]) -> None:
        """Record that handlers wait for tasks that are not due."""
        self._error = NotIdle(
            f"{', '.join(sorted(set(names)))}: waits for a task that is not due, so it cannot end; advance the clock, "
            "or drain with until_idle=True"
        )

    def may_start(self, task: Task) -> bool:
        """Count a run of a task. Return False if the limit was reached before."""
        self._started += 1
        if self._started <= self._limit:
            return True
        names = most_common([*(run.task for run in self._runs[-_TAIL:]), name_of(task)])
        self._error = NotIdle(
            f"not idle after {self._limit} runs; the last ones were: {names}. Pass a higher limit if these tasks end, "
            "or until_idle=False to run only the tasks that wait now"
        )
        return False

    def note_error(self, deliveries: Iterable[AnyDelivery], error: BaseException) -> None:
        """Record the exception with which an attempt failed, before its end. Thread-safe."""
        for delivery in deliveries:
            self._errors[delivery.receipt] = error

    def note_expired(self, expired: Iterable[Expired]) -> None:
        """Record tasks whose deadlines passed."""
        self._expired += expired

    def note_lost(self, deliveries: Iterable[Delivery]) -> None:
        """Record attempts that a crash of the worker ended."""
        for delivery in deliveries:
            self._note(delivery, End.LOST)

    def note_end(self, delivery: Delivery, outcome: Outcome) -> Outcome:
        """Record the end of an attempt, and return the outcome to report.

        If the drain delivers twice, the first success of a task is reported as a loss, as if the worker had crashed
        before the ack.
        """
        task = (delivery.task.key, delivery.task.id)
        if self._deliver_twice and type(outcome) is Success and task not in self._repeated:
            self._repeated.add(task)
            self._note(delivery, End.REPEATED)
            return HandBack(lost=True)
        self._note(delivery, _ENDS[type(outcome)], self._error_of(delivery, outcome))
        return outcome

    async def note_settled(self, dead_letters: DeadLetters, receipts: Iterable[str]) -> None:
        """Record the dead letters among the tasks whose attempts ended. ``receipts``: those that are settled."""
        for receipt in receipts:
            task, index = self._unsettled.pop(receipt, (None, 0))
            if task is not None:
                dead = await dead_letters.get(task.key, task.id)
                self._runs[index] = msgspec.structs.replace(self._runs[index], dead=dead)

    async def advance(self, control: Control, due_at: float | None) -> bool:
        """Advance the clock to the next moment at which something is due. Return False at the end of the drain.

        ``due_at``: the time at which the next task becomes available.
        """
        now = self._clock.now()
        if self._until is None or now >= self._until:
            return False
        fires_at = (await self._schedules.due(1)).next_at
        times = [self._until, due_at, fires_at, *self._deadlines]
        await self._clock.advance_to(min(time for time in times if time is not None and time > now))
        self.notify()
        self._started = 0  # the limit is that of one moment
        self.note_expired((await control.maintain()).expired)
        while (await fire_due(self._schedules, set())).schedules:
            pass
        return True

    def _note(self, delivery: Delivery, end: End, error: BaseException | None = None) -> None:
        task = delivery.task
        if end is not End.DONE:
            self._unsettled[delivery.receipt] = task, len(self._runs)
        self._runs.append(
            Run(task=name_of(task), id=task.id, attempt=delivery.attempt, end=end, error=error)
        )

    def _error_of(self, delivery: Delivery, outcome: Outcome) -> BaseException | None:
        match outcome:
            case Failed(text):
                if (error := self._errors.pop(delivery.receipt, None)) is not None:
                    return error
            case Rejected(reason, text) if reason in _FAULTS:
                pass
            case _:
                return None
        task = delivery.task
        return TaskFailed(
            f"task {task.id} of {name_of(task)} failed: {text}", key=task.key, id=task.id
        )
