# ruff: noqa: D102 - each method stands for the one of the backend that it breaks
"""Backends that break one promise each about the limits of the flow."""

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
    """Return the queue behind a facade."""
    return facade.inner._store.queue(key)


# At the door


class CountsRetries(FacadePublisher):
    """Retries count against the capacity."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        queue_of(self.facade, task.key).fresh += 1
        return await super().schedule_retry(task, at, **options)


class RefusesRetries(FacadePublisher):
    """A full queue refuses retries, too."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        queue = queue_of(self.facade, task.key)
        refused = refusal(task, queue.settings, queue.fresh)
        return refused or await super().schedule_retry(task, at, **options)


class RefusesDuplicates(FacadePublisher):
    """There is room or there is not, whatever is known of the task."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers: list[Confirmation] = []
        for task in tasks:
            queue = queue_of(self.facade, task.key)
            refused = refusal(task, queue.settings, queue.fresh)
            answers += [refused] if refused else await super().publish(task)
        return tuple(answers)


class RefusesTheBatch(FacadePublisher):
    """A batch that does not fit is refused as a whole."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        queue = queue_of(self.facade, tasks[0].key)
        refused = refusal(tasks[0], queue.settings, queue.fresh + len(tasks) - 1)
        if refused is None:
            return await super().publish(*tasks)
        return tuple(msgspec.structs.replace(refused, task_id=task.id) for task in tasks)


class RefusesInSilence(FacadePublisher):
    """A refusal has no reason."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return tuple(
            msgspec.structs.replace(answer, reason=None, retry_after=None)
            for answer in await super().publish(*tasks)
        )


class KeepsTheRoom(FacadeControl):
    """A cancelled task takes room still."""

    async def cancel(self, key: str, task_id: str) -> bool:
        before = queue_of(self.facade, key).fresh
        cancelled: bool = await self.inner.cancel(key, task_id)
        queue_of(self.facade, key).fresh = before
        return cancelled


class DropsTheSurplus(FacadeControl):
    """What a lowered capacity has no room for is dropped."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        if settings.capacity is not None and settings.capacity < queue_of(self.facade, key).fresh:
            await self.inner.purge(key)
        return await self.inner.configure(key, settings)


# Handing out


class LyingControl(FacadeControl, ABC):
    """Shows the settings that were asked for, and puts others in force."""

    key: str
    """the queue that is configured"""

    @abstractmethod
    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        """Return what is put in force instead."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """Put other ones in force."""
        self.key = key
        twisted = settings.model_copy(update=self.twist(settings))
        confirmed = await self.inner.configure(key, twisted)
        self.facade.values[key] = settings.model_copy(update={"version": confirmed.version})
        return self.facade.values[key]

    async def settings(self, key: str) -> QueueSettings:
        """Tell those that were asked for."""
        return self.facade.values.get(key) or await self.inner.settings(key)


class GivesOneTooMany(LyingControl):
    """One more is in flight than may be."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        return {"max_inflight": settings.max_inflight and settings.max_inflight + 1}


class HandsOutWhilePaused(LyingControl):
    """A pause is confirmed, and that is all."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - as the defect has it
        return {"paused": False}


class LimitsEachWorker(FacadeSubscription):
    """Every worker has the limit in flight for itself."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        queue = queue_of(self.facade, self.inner.keys[0])
        others = queue.states[State.IN_FLIGHT] - len(self.inner.owned)
        queue.states[State.IN_FLIGHT] -= others
        try:
            return await super().receive(limit, timeout)
        finally:
            queue.states[State.IN_FLIGHT] += others


class WakesNobody(FacadeSubscription):
    """A place that comes free is found by the next receive, and by none that waits."""

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
    """A limit that was raised or lifted wakes nobody."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        queue = queue_of(self.facade, key)
        sleepers = dict(queue.waiting)
        queue.waiting.clear()
        confirmed: QueueSettings = await self.inner.configure(key, settings)
        queue.waiting.update(sleepers)
        return confirmed


class TakesTheSurplusBack(FacadeControl):
    """What runs beyond a lowered limit is taken from its workers."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        confirmed = await self.inner.configure(key, settings)
        running = [r for r in queue_of(self.facade, key).records.values() if r.receipt]
        for record in running[settings.max_inflight or len(running) :]:
            self.facade.inner._store.hand_back(record, lost=False)
        return confirmed


class NeverRests(FacadeSubscription):
    """Work that a limit holds up is had by asking again and again."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        queues = [queue_of(self.facade, key) for key in self.inner.keys]
        has_work = any(queue.states[State.WAITING] for queue in queues)
        return msgspec.structs.replace(received, again=has_work)


class OneHoldsUpAll(FacadeSubscription):
    """A limited queue holds up the others of a subscription."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        queues = [queue_of(self.facade, key) for key in self.inner.keys]
        if timeout == 0 and not all(queue.room(self.facade.now()).left for queue in queues):
            return Received()
        return await super().receive(limit, timeout)


# Tokens


class RefundsTokens(FacadeSubscription):
    """What is released has cost no token."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        for delivery in deliveries:
            bucket = queue_of(self.facade, delivery.task.key).bucket
            if bucket is not None:
                bucket.tokens += 1
        return await super().redeliver(*deliveries, lost=lost)


class ChargesTheExpired(FacadeSubscription):
    """What expires has cost a token."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        for entry in received.expired:
            bucket = queue_of(self.facade, entry.key).bucket
            if bucket is not None:
                bucket.tokens -= 1
        return received


class FillsAtOnce(FacadeSubscription):
    """The bucket is full again before its time, all at once."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        queue = queue_of(self.facade, self.inner.keys[0])
        rate = queue.settings.rate_limit
        if rate and queue.bucket and self.facade.now() >= queue.bucket.at + rate.period / 2:
            queue.bucket.tokens = rate.max_tokens
        return await super().receive(limit, timeout)


class SleepsThroughTokens(FacadeSubscription):
    """A token that comes is found by the next receive, and by none that waits."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        for key in self.inner.keys:  # somebody else is said to wake
            queue_of(self.facade, key).alarm = self.inner
        return await super().receive(limit, timeout)


class HidesTheNextToken(FacadeSubscription):
    """Nobody is told when there is a token again."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        return msgspec.structs.replace(await super().receive(limit, timeout), due_at=None)


class RefillsOnChange(FacadeControl):
    """A changed limit comes with a full bucket."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        confirmed = await self.inner.configure(key, settings)
        queue = queue_of(self.facade, key)
        if queue.bucket is not None and settings.rate_limit is not None:
            queue.bucket.tokens = settings.rate_limit.max_tokens
        return confirmed
