# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Backends that each break one promise about stalled tasks, moved queues, copies for bound queues or room signals."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, Task
from taskqueue_memory.room_signal import MemoryRoomSignal
from tests.conformance.broken_limits import LyingControl, queue_of
from tests.conformance.facade import Facade, FacadeControl, FacadePublisher


class NeverEndsTheHung(LyingControl):
    """Defect: a task that stalls is never recovered."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - the defect ignores it
        return {"max_processing_time": None}


class ForgetsTheTimeout(LyingControl):
    """Defect: deliveries lack the timeout that the settings confirm."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - the defect ignores it
        return {"timeout": None}


class EndsTheHealthy(FacadeControl):
    """Defect: a long task is recovered although it reports progress."""

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        record = self.facade.inner._store.receipts.get(delivery.receipt)
        if record is not None:
            record.progress = value
        return record is not None


class HangsForNothing(Facade):
    """Defect: a stalled task is released instead of being counted as lost."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        store = self.inner._store
        whole = store.hand_back

        def hand_back(record: Any, *, lost: bool, reported: bool = True) -> None:
            whole(record, lost=lost and reported, reported=reported)

        store.hand_back = hand_back  # type: ignore[method-assign]


class RaisesHopes(FacadePublisher):
    """Defect: the refusal of a queue that has moved suggests to try again."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers = await super().publish(*tasks)
        return tuple(
            msgspec.structs.replace(answer, retry_after=1.0)
            if answer.code is Refusal.MOVED
            else answer
            for answer in answers
        )


class MovesRetries(FacadePublisher):
    """Defect: a queue that has moved refuses retries too."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        settings = queue_of(self.facade, task.key).settings
        if settings.moved_to is None:
            return await super().schedule_retry(task, at, **options)
        return Confirmation(
            key=task.key, task_id=task.id, status=Published.REFUSED, code=Refusal.MOVED
        )


class CopiesByHalves(FacadePublisher):
    """Defect: if one of the bound queues refuses a task, the others still store their copies."""

    def targets(self, task: Task, depth: int) -> tuple[str, ...]:
        """Return the queues that get a copy of the task."""
        return () if depth else queue_of(self.facade, task.key).settings.bound_to

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return tuple([await self._publish(task, 0) for task in tasks])

    async def _publish(self, task: Task, depth: int) -> Confirmation:
        targets = self.targets(task, depth)
        if not targets:
            return await self._put(task)
        copies = [msgspec.structs.replace(task, key=key) for key in targets]
        answers = [
            await (self._put(copy) if copy.key == task.key else self._publish(copy, depth + 1))
            for copy in copies
        ]
        refused = [answer for answer in answers if not answer.stored]
        return msgspec.structs.replace((refused or answers)[0], key=task.key)

    async def _put(self, task: Task) -> Confirmation:
        queue = queue_of(self.facade, task.key)
        before = queue.settings
        queue.settings = before.model_copy(update={"bound_to": ()})
        try:
            (answer,) = await self.inner.publish(task)
            return answer
        finally:
            queue.settings = before


class CopiesCopies(CopiesByHalves):
    """Defect: a copy is passed on to the queues that its own queue is bound to."""

    def targets(self, task: Task, depth: int) -> tuple[str, ...]:
        return () if depth > 2 else queue_of(self.facade, task.key).settings.bound_to


class CopiesOnce(CopiesByHalves):
    """Defect: only the first bound queue gets a copy."""

    def targets(self, task: Task, depth: int) -> tuple[str, ...]:
        return super().targets(task, depth)[:1]


class KeepsTheOriginal(CopiesByHalves):
    """Defect: a queue bound to others keeps a copy itself."""

    def targets(self, task: Task, depth: int) -> tuple[str, ...]:
        targets = super().targets(task, depth)
        return tuple(dict.fromkeys((*targets, task.key))) if targets else ()


class CancelsInSilence(FacadeControl):
    """Defect: a cancelled task makes room, but no room signal is sent."""

    async def cancel(self, key: str, task_id: str) -> bool:
        signals = self.facade.inner._store.signals
        heard, signals.open = signals.open, {}
        try:
            cancelled: bool = await self.inner.cancel(key, task_id)
            return cancelled
        finally:
            signals.open = heard


class _LateBell(MemoryRoomSignal):
    async def wait(self, timeout: float) -> None:
        self._notified.clear()
        await super().wait(timeout)


class _RestlessBell(MemoryRoomSignal):
    async def wait(self, timeout: float) -> None:
        await asyncio.sleep(0)
        await super().wait(min(timeout, 0))


class _BellPublisher(FacadePublisher):
    signal: type[MemoryRoomSignal]

    def room_signal(self, *keys: str) -> MemoryRoomSignal:
        return self.signal(self.facade.inner._store.signals, keys)


class MissesRings(_BellPublisher):
    """Defect: room that becomes available before a publisher waits for the signal is missed."""

    signal = _LateBell


class RingsAllTheTime(_BellPublisher):
    """Defect: a room signal notifies all the time, so that a waiting publisher retries again and again."""

    signal = _RestlessBell
