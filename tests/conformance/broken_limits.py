# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Backends that each break one promise about the limits of a queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from taskqueue_core.authoring.helpers import refusal
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Confirmation, Delivery, Received, Settled, State, Task
from taskqueue_memory.records import QueueState
from tests.conformance.facade import Facade, FacadeControl, FacadePublisher, FacadeSubscription


def queue_of(facade: Facade, key: str) -> QueueState:
    """Return the internal queue of the memory backend behind a facade."""
    return facade.inner._store.queue(key)


class CountsRetries(FacadePublisher):
    """Defect: retries count against the capacity."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        queue_of(self.facade, task.key).fresh += 1
        return await super().schedule_retry(task, at, **options)


class RefusesRetries(FacadePublisher):
    """Defect: a full queue refuses retries too."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        queue = queue_of(self.facade, task.key)
        refused = refusal(task, queue.settings, queue.fresh)
        return refused or await super().schedule_retry(task, at, **options)


class RefusesDuplicates(FacadePublisher):
    """Defect: a full queue refuses a task that it already has, instead of reporting a duplicate."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers: list[Confirmation] = []
        for task in tasks:
            queue = queue_of(self.facade, task.key)
            refused = refusal(task, queue.settings, queue.fresh)
            answers += [refused] if refused else await super().publish(task)
        return tuple(answers)


class RefusesTheBatch(FacadePublisher):
    """Defect: a batch that does not fit is refused as a whole."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        queue = queue_of(self.facade, tasks[0].key)
        refused = refusal(tasks[0], queue.settings, queue.fresh + len(tasks) - 1)
        if refused is None:
            return await super().publish(*tasks)
        return tuple(msgspec.structs.replace(refused, task_id=task.id) for task in tasks)


class RefusesInSilence(FacadePublisher):
    """Defect: a refusal has no reason and no suggested delay."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return tuple(
            msgspec.structs.replace(answer, reason=None, retry_after=None)
            for answer in await super().publish(*tasks)
        )


class KeepsTheRoom(FacadeControl):
    """Defect: a cancelled task still counts against the capacity."""

    async def cancel(self, key: str, task_id: str) -> bool:
        before = queue_of(self.facade, key).fresh
        cancelled: bool = await self.inner.cancel(key, task_id)
        queue_of(self.facade, key).fresh = before
        return cancelled


class DropsTheSurplus(FacadeControl):
    """Defect: lowering the capacity removes the tasks above it."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        if settings.capacity is not None and settings.capacity < queue_of(self.facade, key).fresh:
            await self.inner.purge(key)
        return await self.inner.configure(key, settings)


class LyingControl(FacadeControl, ABC):
    """A control that reports the requested settings, but applies different ones."""

    key: str
    """the queue configured last"""

    @abstractmethod
    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        """Return the settings to change, with the values that are applied instead."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """Apply changed settings, and return the requested ones."""
        self.key = key
        twisted = settings.model_copy(update=self.twist(settings))
        confirmed = await self.inner.configure(key, twisted)
        self.facade.values[key] = settings.model_copy(update={"version": confirmed.version})
        return self.facade.values[key]

    async def settings(self, key: str) -> QueueSettings:
        """Return the settings as they were requested."""
        return self.facade.values.get(key) or await self.inner.settings(key)


class GivesOneTooMany(LyingControl):
    """Defect: one delivery more than the limit is in flight."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        return {"max_inflight": settings.max_inflight and settings.max_inflight + 1}


class HandsOutWhilePaused(LyingControl):
    """Defect: pausing a queue is confirmed but has no effect."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - the defect ignores it
        return {"paused": False}


class LimitsEachWorker(FacadeSubscription):
    """Defect: the limit of deliveries in flight applies to each worker instead of the queue."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        queue = queue_of(self.facade, self.inner.keys[0])
        others = queue.states[State.IN_FLIGHT] - len(self.inner.owned)
        queue.states[State.IN_FLIGHT] -= others
        try:
            return await super().receive(limit, timeout)
        finally:
            queue.states[State.IN_FLIGHT] += others


class WakesNobody(FacadeSubscription):
    """Defect: a delivery that ends makes room for another, but no waiting receive is woken."""

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        queues = [queue_of(self.facade, delivery.task.key) for delivery in deliveries]
        sleepers = [dict(queue.waiting) for queue in queues]
        for queue in queues:
            queue.waiting.clear()
        try:
            return await super().ack(*deliveries, results=results)
        finally:
            for queue, some in zip(queues, sleepers, strict=True):
                queue.waiting.update(some)


class ChangesInSilence(FacadeControl):
    """Defect: raising or removing a limit wakes no waiting receive."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        queue = queue_of(self.facade, key)
        sleepers = dict(queue.waiting)
        queue.waiting.clear()
        confirmed: QueueSettings = await self.inner.configure(key, settings)
        queue.waiting.update(sleepers)
        return confirmed


class TakesTheSurplusBack(FacadeControl):
    """Defect: lowering a limit releases the deliveries above it, which their workers still execute."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        confirmed = await self.inner.configure(key, settings)
        running = [r for r in queue_of(self.facade, key).records.values() if r.receipt]
        for record in running[settings.max_inflight or len(running) :]:
            self.facade.inner._store.hand_back(record, lost=False)
        return confirmed


class NeverRests(FacadeSubscription):
    """Defect: a receive reports more work while a limit prevents its delivery, so that consumers poll."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        queues = [queue_of(self.facade, key) for key in self.inner.keys]
        has_work = any(queue.states[State.WAITING] for queue in queues)
        return msgspec.structs.replace(received, again=has_work)


class OneHoldsUpAll(FacadeSubscription):
    """Defect: a queue at its limit also stops deliveries from the other queues of a subscription."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        queues = [queue_of(self.facade, key) for key in self.inner.keys]
        if timeout == 0 and not all(queue.room(self.facade.now()).left for queue in queues):
            return Received()
        return await super().receive(limit, timeout)


class RefundsTokens(FacadeSubscription):
    """Defect: releasing a delivery gives its token back."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        for delivery in deliveries:
            bucket = queue_of(self.facade, delivery.task.key).bucket
            if bucket is not None:
                bucket.tokens += 1
        return await super().redeliver(*deliveries, lost=lost)


class ChargesTheExpired(FacadeSubscription):
    """Defect: a task that expires uses a token."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        for entry in received.expired:
            bucket = queue_of(self.facade, entry.key).bucket
            if bucket is not None:
                bucket.tokens -= 1
        return received


class FillsAtOnce(FacadeSubscription):
    """Defect: the token bucket is full again after half of its period."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        queue = queue_of(self.facade, self.inner.keys[0])
        rate = queue.settings.rate_limit
        if rate and queue.bucket and self.facade.now() >= queue.bucket.at + rate.period / 2:
            queue.bucket.tokens = rate.max_tokens
        return await super().receive(limit, timeout)


class SleepsThroughTokens(FacadeSubscription):
    """Defect: an available token does not wake a receive that waits for it."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        for key in self.inner.keys:  # another subscription is said to have set the timer
            queue_of(self.facade, key).alarm = self.inner
        return await super().receive(limit, timeout)


class HidesTheNextToken(FacadeSubscription):
    """Defect: a receive does not report when the next token will be available."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        return msgspec.structs.replace(await super().receive(limit, timeout), due_at=None)


class RefillsOnChange(FacadeControl):
    """Defect: changing a rate limit fills the token bucket."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        confirmed = await self.inner.configure(key, settings)
        queue = queue_of(self.facade, key)
        if queue.bucket is not None and settings.rate_limit is not None:
            queue.bucket.tokens = settings.rate_limit.max_tokens
        return confirmed
