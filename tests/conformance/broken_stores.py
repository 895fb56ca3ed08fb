# ruff: noqa: D102 - each method stands for the one of the backend that it breaks
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
from tests.conformance.facade import Facade, FacadeControl, FacadeDeadLetters, FacadePublisher

# Publishing and retrying


class DeliversEarly(FacadePublisher):
    """Scheduled tasks are available at once."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await super().publish(*(msgspec.structs.replace(t, not_before=None) for t in tasks))


class IgnoresDeadlines(FacadePublisher):
    """Deadlines mean nothing."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await super().publish(*(msgspec.structs.replace(t, deadline=None) for t in tasks))


class ForgetsDedupe(FacadePublisher):
    """What has ended is forgotten at once."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        for task in tasks:
            present = await self.facade.inner.control.settings(task.key)
            changed = present.model_copy(update={"dedupe_window": 0.0})
            await self.facade.inner.control.configure(task.key, changed)
        return await super().publish(*tasks)


class PublishesTwice(FacadePublisher):
    """A resend makes a second copy."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers = await super().publish(*tasks)
        for task, told in zip(tasks, answers, strict=True):
            if told.status is Published.DUPLICATE:
                copy = msgspec.structs.replace(task, id=f"{task.id}-copy")
                await super().publish(copy)
        return answers


class RetryAsNoOp(FacadePublisher):
    """A retry is confirmed, and that is all."""

    async def schedule_retry(
        self,
        task: Task,
        at: float,  # noqa: ARG002 - that it is ignored is the defect
        **options: Any,  # noqa: ARG002 - as above
    ) -> Confirmation:
        return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)


class DropsRetries(FacadePublisher):
    """Beyond a hundred retries, more are dropped."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        ledger = await self.facade.inner.control.ledger(task.key)
        if ledger.scheduled < 100:
            return await super().schedule_retry(task, at, **options)
        return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)


class UnfencedRetry(FacadePublisher):
    """A retry does not look at the receipt, nor at the token."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        return await super().schedule_retry(task, at, **options | {"settles": None, "token": None})


# Operating


class CountsWrong(FacadeControl):
    """The ledger forgets what is scheduled."""

    async def ledger(self, key: str) -> Ledger:
        ledger: Ledger = await self.inner.ledger(key)
        return msgspec.structs.replace(ledger, scheduled=0)


class ExpiresTwice(FacadeControl):
    """Maintenance reports an expired task again."""

    last: tuple[Any, ...] = ()

    async def maintain(self) -> Maintained:
        done: Maintained = await self.inner.maintain()
        repeated, self.last = self.last, done.expired
        return msgspec.structs.replace(done, expired=done.expired + repeated)


class SettingsLag(FacadeControl):
    """Confirmed settings are not in force."""

    shown: dict[str, QueueSettings]

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        before: QueueSettings = await self.inner.settings(key)
        confirmed: QueueSettings = await self.inner.configure(key, settings)
        await self.inner.configure(key, before.model_copy(update={"version": confirmed.version}))
        return confirmed


class ForgetsTheOtherConnection(FacadeControl):
    """Closing one subscription of a worker forgets the worker."""

    async def workers(self) -> tuple[WorkerInfo, ...]:
        closed = {s.consumer for s in self.facade.subscriptions if s.inner.closed}
        return tuple(w for w in await self.inner.workers() if w.worker_id not in closed)


class RewritesAnswers(FacadeControl):
    """A cancel changes what an older settlement is answered when it is sent again."""

    async def cancel(self, key: str, task_id: str) -> bool:
        cancelled: bool = await self.inner.cancel(key, task_id)
        record = self.facade.inner._store.find(key, task_id)
        if cancelled and record is not None and record.last is not None:
            record.last = (*record.last[:2], Settled.LEASE_LOST)
        return cancelled


class NoHistory(FacadeDeadLetters):
    """Dead letters come without their history."""

    async def list(self, key: str, **page: Any) -> tuple[DeadLetter, ...]:
        letters = await self.inner.list(key, **page)
        return tuple(msgspec.structs.replace(letter, history=()) for letter in letters)


class RedriveLoses(FacadeDeadLetters):
    """A redriven task is gone."""

    async def redrive(self, key: str, *task_ids: str) -> int:
        moved: int = await self.inner.discard(key, *task_ids)
        return moved


class Overstating(Facade):
    """Declares what it does not have: tasks do not survive it."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of the memory backend, and durability."""
        return msgspec.structs.replace(self.inner.capabilities, durable=True)
