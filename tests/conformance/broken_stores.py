"""Backends whose publisher or operator's side breaks one promise each, most of them as a real one did."""

from __future__ import annotations

from typing import Any

import msgspec

from taskqueue_core.backend import Capabilities
from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.tasks import (
    Confirmation,
    DeadLetter,
    Ledger,
    Published,
    Settled,
    Task,
    WorkerInfo,
)
from tests.conformance.facade import (
    Facade,
    FacadeControl,
    FacadeDeadLetters,
    FacadePublisher,
)

# Publishing and retrying


class _EarlyPublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await super().publish(*(msgspec.structs.replace(t, not_before=None) for t in tasks))


class DeliversEarly(Facade):
    """Scheduled tasks are available at once."""

    publisher_type = _EarlyPublisher


class _TimelessPublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await super().publish(*(msgspec.structs.replace(t, deadline=None) for t in tasks))


class IgnoresDeadlines(Facade):
    """Deadlines mean nothing."""

    publisher_type = _TimelessPublisher


class _ForgetfulPublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        for task in tasks:
            present = await self.facade.inner.control.settings(task.key)
            changed = present.model_copy(update={"dedupe_window": 0.0})
            await self.facade.inner.control.configure(task.key, changed)
        return await super().publish(*tasks)


class ForgetsDedupe(Facade):
    """What has ended is forgotten at once."""

    publisher_type = _ForgetfulPublisher


class _DoublePublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers = await super().publish(*tasks)
        for task, told in zip(tasks, answers, strict=True):
            if told.status is Published.DUPLICATE:
                copy = msgspec.structs.replace(task, id=f"{task.id}-copy")
                await super().publish(copy)
        return answers


class PublishesTwice(Facade):
    """A resend makes a second copy."""

    publisher_type = _DoublePublisher


class _NoRetryPublisher(FacadePublisher):
    async def schedule_retry(
        self,
        task: Task,
        at: float,  # noqa: ARG002 - that it is ignored is the defect
        **options: Any,  # noqa: ARG002 - as above
    ) -> Confirmation:
        return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)


class RetryAsNoOp(Facade):
    """A retry is confirmed, and that is all."""

    publisher_type = _NoRetryPublisher


class _DroppingPublisher(FacadePublisher):
    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        ledger = await self.facade.inner.control.ledger(task.key)
        if ledger.scheduled < 100:
            return await super().schedule_retry(task, at, **options)
        return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)


class DropsRetries(Facade):
    """Beyond a hundred retries, more are dropped."""

    publisher_type = _DroppingPublisher


class _UnfencedPublisher(FacadePublisher):
    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        return await super().schedule_retry(task, at, **options | {"settles": None, "token": None})


class UnfencedRetry(Facade):
    """A retry does not look at the receipt, nor at the token."""

    publisher_type = _UnfencedPublisher


# Operating


class _MiscountingControl(FacadeControl):
    async def ledger(self, key: str) -> Ledger:
        ledger: Ledger = await self.inner.ledger(key)
        return msgspec.structs.replace(ledger, scheduled=0)


class CountsWrong(Facade):
    """The ledger forgets what is scheduled."""

    control_type = _MiscountingControl


class _RepeatingControl(FacadeControl):
    last: tuple[Any, ...] = ()

    async def maintain(self) -> Maintained:
        done: Maintained = await self.inner.maintain()
        repeated, self.last = self.last, done.expired
        return msgspec.structs.replace(done, expired=done.expired + repeated)


class ExpiresTwice(Facade):
    """Housekeeping reports an expired task again."""

    control_type = _RepeatingControl


class _LaggingControl(FacadeControl):
    shown: dict[str, QueueSettings]

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        before: QueueSettings = await self.inner.settings(key)
        confirmed: QueueSettings = await self.inner.configure(key, settings)
        await self.inner.configure(key, before.model_copy(update={"version": confirmed.version}))
        return confirmed


class SettingsLag(Facade):
    """Confirmed settings are not in force."""

    control_type = _LaggingControl


class _ForgettingControl(FacadeControl):
    async def workers(self) -> tuple[WorkerInfo, ...]:
        closed = {s.consumer for s in self.facade.subscriptions if s.inner.closed}
        return tuple(w for w in await self.inner.workers() if w.worker_id not in closed)


class ForgetsTheOtherConnection(Facade):
    """Closing one subscription of a worker forgets the worker."""

    control_type = _ForgettingControl


class _RewritingControl(FacadeControl):
    async def cancel(self, key: str, task_id: str) -> bool:
        cancelled: bool = await self.inner.cancel(key, task_id)
        record = self.facade.inner._store.find(key, task_id)
        if cancelled and record is not None and record.last is not None:
            record.last = (*record.last[:2], Settled.LEASE_LOST)
        return cancelled


class RewritesAnswers(Facade):
    """A cancel changes what an older settlement is answered when it is sent again."""

    control_type = _RewritingControl


class _BareDeadLetters(FacadeDeadLetters):
    async def list(self, key: str, **page: Any) -> tuple[DeadLetter, ...]:
        letters = await self.inner.list(key, **page)
        return tuple(msgspec.structs.replace(letter, history=()) for letter in letters)


class NoHistory(Facade):
    """Dead letters come without their history."""

    dead_letters_type = _BareDeadLetters


class _LosingDeadLetters(FacadeDeadLetters):
    async def redrive(self, key: str, *task_ids: str) -> int:
        moved: int = await self.inner.discard(key, *task_ids)
        return moved


class RedriveLoses(Facade):
    """A redriven task is gone."""

    dead_letters_type = _LosingDeadLetters


class Overstating(Facade):
    """Declares what it does not have: tasks do not survive it."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of the memory backend, and durability."""
        return msgspec.structs.replace(self.inner.capabilities, durable=True)
