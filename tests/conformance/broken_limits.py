"""Backends that break one promise each about the limits of the flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from taskqueue_core.authoring import refusal
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Confirmation, Delivery, Received, Settled, State, Task
from taskqueue_memory.records import QueueState
from tests.conformance.facade import Facade, FacadeControl, FacadePublisher, FacadeSubscription


def queue_of(facade: Facade, key: str) -> QueueState:
    """Return the queue behind a facade."""
    return facade.inner._store.queue(key)


# At the door


class _CountingPublisher(FacadePublisher):
    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        queue_of(self.facade, task.key).fresh += 1
        return await super().schedule_retry(task, at, **options)


class CountsRetries(Facade):
    """Retries count against the capacity."""

    publisher_type = _CountingPublisher


class _StrictPublisher(FacadePublisher):
    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        queue = queue_of(self.facade, task.key)
        refused = refusal(task, queue.settings, queue.fresh)
        return refused or await super().schedule_retry(task, at, **options)


class RefusesRetries(Facade):
    """A full queue refuses retries, too."""

    publisher_type = _StrictPublisher


class _HastyPublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers: list[Confirmation] = []
        for task in tasks:
            queue = queue_of(self.facade, task.key)
            refused = refusal(task, queue.settings, queue.fresh)
            answers += [refused] if refused else await super().publish(task)
        return tuple(answers)


class RefusesDuplicates(Facade):
    """There is room or there is not, whatever is known of the task."""

    publisher_type = _HastyPublisher


class _WholePublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        queue = queue_of(self.facade, tasks[0].key)
        refused = refusal(tasks[0], queue.settings, queue.fresh + len(tasks) - 1)
        if refused is None:
            return await super().publish(*tasks)
        return tuple(msgspec.structs.replace(refused, task_id=task.id) for task in tasks)


class RefusesTheBatch(Facade):
    """A batch that does not fit is refused as a whole."""

    publisher_type = _WholePublisher


class _SilentPublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return tuple(
            msgspec.structs.replace(answer, reason=None, retry_after=None)
            for answer in await super().publish(*tasks)
        )


class RefusesInSilence(Facade):
    """A refusal has no reason."""

    publisher_type = _SilentPublisher


class _KeepingControl(FacadeControl):
    async def cancel(self, key: str, task_id: str) -> bool:
        before = queue_of(self.facade, key).fresh
        cancelled: bool = await self.inner.cancel(key, task_id)
        queue_of(self.facade, key).fresh = before
        return cancelled


class KeepsTheRoom(Facade):
    """A cancelled task takes room still."""

    control_type = _KeepingControl


class _DroppingControl(FacadeControl):
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        if settings.capacity is not None and settings.capacity < queue_of(self.facade, key).fresh:
            await self.inner.purge(key)
        return await self.inner.configure(key, settings)


class DropsTheSurplus(Facade):
    """What a lowered capacity has no room for is dropped."""

    control_type = _DroppingControl


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
        self.facade.told[key] = settings.model_copy(update={"version": confirmed.version})
        return self.facade.told[key]

    async def settings(self, key: str) -> QueueSettings:
        """Tell those that were asked for."""
        return self.facade.told.get(key) or await self.inner.settings(key)


class _GenerousControl(LyingControl):
    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        return {"max_inflight": settings.max_inflight and settings.max_inflight + 1}


class GivesOneTooMany(Facade):
    """One more is in flight than may be."""

    control_type = _GenerousControl


class _RestlessControl(LyingControl):
    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - as the defect has it
        return {"paused": False}


class HandsOutWhilePaused(Facade):
    """A pause is confirmed, and that is all."""

    control_type = _RestlessControl


class _ApartSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        queue = queue_of(self.facade, self.inner.keys[0])
        others = queue.states[State.IN_FLIGHT] - len(self.inner.owned)
        queue.states[State.IN_FLIGHT] -= others
        try:
            return await super().receive(limit, timeout)
        finally:
            queue.states[State.IN_FLIGHT] += others


class LimitsEachWorker(Facade):
    """Every worker has the limit in flight for itself."""

    subscription_type = _ApartSubscription


class _MuteSubscription(FacadeSubscription):
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


class WakesNobody(Facade):
    """A place that comes free is found by the next receive, and by none that waits."""

    subscription_type = _MuteSubscription


class _MuteControl(FacadeControl):
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        queue = queue_of(self.facade, key)
        sleepers = dict(queue.waiting)
        queue.waiting.clear()
        confirmed: QueueSettings = await self.inner.configure(key, settings)
        queue.waiting.update(sleepers)
        return confirmed


class ChangesInSilence(Facade):
    """A limit that was raised or lifted wakes nobody."""

    control_type = _MuteControl


class _RevokingControl(FacadeControl):
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        confirmed = await self.inner.configure(key, settings)
        running = [r for r in queue_of(self.facade, key).records.values() if r.receipt]
        for record in running[settings.max_inflight or len(running) :]:
            self.facade.inner._store.hand_back(record, lost=False)
        return confirmed


class TakesTheSurplusBack(Facade):
    """What runs beyond a lowered limit is taken from its workers."""

    control_type = _RevokingControl


class _BusySubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        queues = [queue_of(self.facade, key) for key in self.inner.keys]
        has_work = any(queue.states[State.WAITING] for queue in queues)
        return msgspec.structs.replace(received, again=has_work)


class NeverRests(Facade):
    """Work that a limit holds up is had by asking again and again."""

    subscription_type = _BusySubscription


class _BlockedSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        queues = [queue_of(self.facade, key) for key in self.inner.keys]
        if timeout == 0 and not all(queue.room(self.facade.now()).left for queue in queues):
            return Received()
        return await super().receive(limit, timeout)


class OneHoldsUpAll(Facade):
    """A limited queue holds up the others of a subscription."""

    subscription_type = _BlockedSubscription


# Tokens


class _RefundingSubscription(FacadeSubscription):
    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        for delivery in deliveries:
            bucket = queue_of(self.facade, delivery.task.key).bucket
            if bucket is not None:
                bucket.tokens += 1
        return await super().redeliver(*deliveries, lost=lost)


class RefundsTokens(Facade):
    """What is handed back has cost no token."""

    subscription_type = _RefundingSubscription


class _ChargingSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        for entry in received.expired:
            bucket = queue_of(self.facade, entry.key).bucket
            if bucket is not None:
                bucket.tokens -= 1
        return received


class ChargesTheExpired(Facade):
    """What expires has cost a token."""

    subscription_type = _ChargingSubscription


class _WindowedSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        queue = queue_of(self.facade, self.inner.keys[0])
        rate = queue.settings.rate_limit
        if rate and queue.bucket and self.facade.now() >= queue.bucket.at + rate.period / 2:
            queue.bucket.tokens = rate.max_tokens
        return await super().receive(limit, timeout)


class FillsAtOnce(Facade):
    """The bucket is full again before its time, all at once."""

    subscription_type = _WindowedSubscription


class _TimelessSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        for key in self.inner.keys:  # somebody else is said to wake
            queue_of(self.facade, key).alarm = self.inner
        return await super().receive(limit, timeout)


class SleepsThroughTokens(Facade):
    """A token that comes is found by the next receive, and by none that waits."""

    subscription_type = _TimelessSubscription


class _SecretiveSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        return msgspec.structs.replace(await super().receive(limit, timeout), due_at=None)


class HidesTheNextToken(Facade):
    """Nobody is told when there is a token again."""

    subscription_type = _SecretiveSubscription


class _RefillingControl(FacadeControl):
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        confirmed = await self.inner.configure(key, settings)
        queue = queue_of(self.facade, key)
        if queue.bucket is not None and settings.rate_limit is not None:
            queue.bucket.tokens = settings.rate_limit.max_tokens
        return confirmed


class RefillsOnChange(Facade):
    """A changed limit comes with a full bucket."""

    control_type = _RefillingControl
