# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Publishers and controls that each break one promise of the contract, most of them as a real backend once did."""

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
    State,
    Task,
    WorkerInfo,
)
from tests.conformance.facade import Facade, FacadeControl, FacadeDeadLetters, FacadePublisher


class DeliversEarly(FacadePublisher):
    """Defect: scheduled tasks are available at once."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await super().publish(*(msgspec.structs.replace(t, not_before=None) for t in tasks))


class PurgesTooMuch(FacadeControl):
    """Defect: a purge ends tasks that were published after it began."""

    async def purge(self, key: str) -> int:
        number = await self.inner.purge(key)
        return number + await self.inner.purge(key)


class StopsHalfWay(FacadeControl):
    """Defect: a maintenance pass that leaves work does not say so."""

    async def maintain(self) -> Maintained:
        done = await self.inner.maintain()
        return msgspec.structs.replace(done, behind=None, again_in=None)


class IgnoresDeadlines(FacadePublisher):
    """Defect: deadlines have no effect."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await super().publish(*(msgspec.structs.replace(t, deadline=None) for t in tasks))


class ForgetsDedupe(FacadePublisher):
    """Defect: the id of an ended task can be published again at once."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        for task in tasks:
            present = await self.facade.inner.control.settings(task.key)
            changed = present.model_copy(update={"dedupe_window": 0.0})
            await self.facade.inner.control.configure(task.key, changed)
        return await super().publish(*tasks)


class PublishesTwice(FacadePublisher):
    """Defect: publishing a task again stores a second copy."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers = await super().publish(*tasks)
        for task, told in zip(tasks, answers, strict=True):
            if told.status is Published.DUPLICATE:
                copy = msgspec.structs.replace(task, id=f"{task.id}-copy")
                await super().publish(copy)
        return answers


class RetryAsNoOp(FacadePublisher):
    """Defect: a retry is confirmed but has no effect."""

    async def schedule_retry(
        self,
        task: Task,
        at: float,  # noqa: ARG002 - the defect ignores it
        **options: Any,  # noqa: ARG002 - the defect ignores them
    ) -> Confirmation:
        return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)


class DropsRetries(FacadePublisher):
    """Defect: if 100 retries are scheduled, further retries are dropped."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        ledger = await self.facade.inner.control.ledger(task.key)
        if ledger.scheduled < 100:
            return await super().schedule_retry(task, at, **options)
        return Confirmation(key=task.key, task_id=task.id, status=Published.ACCEPTED)


class CountsSnoozes(FacadePublisher):
    """Defect: a retry that is free counts an attempt."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        return await super().schedule_retry(task, at, **options | {"free": False})


class UnfencedRetry(FacadePublisher):
    """Defect: a retry ignores the receipt and the token, so that it can take effect twice."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        return await super().schedule_retry(task, at, **options | {"settles": None, "token": None})


class ReschedulesReleased(FacadeControl):
    """Defect: a task that was released can be put off."""

    async def reschedule(self, key: str, task_id: str, at: float) -> bool:
        if await self.inner.reschedule(key, task_id, at):
            return True
        (status,) = await self.inner.statuses(key, task_id)
        return status is not None and status.state is State.WAITING


class CountsWrong(FacadeControl):
    """Defect: the ledger does not count scheduled tasks."""

    async def ledger(self, key: str) -> Ledger:
        ledger: Ledger = await self.inner.ledger(key)
        return msgspec.structs.replace(ledger, scheduled=0)


class ExpiresTwice(FacadeControl):
    """Defect: maintenance reports each expired task twice."""

    last: tuple[Any, ...] = ()

    async def maintain(self) -> Maintained:
        done: Maintained = await self.inner.maintain()
        repeated, self.last = self.last, done.expired
        return msgspec.structs.replace(done, expired=done.expired + repeated)


class SettingsLag(FacadeControl):
    """Defect: changed settings are confirmed but not applied."""

    shown: dict[str, QueueSettings]

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        before: QueueSettings = await self.inner.settings(key)
        confirmed: QueueSettings = await self.inner.configure(key, settings)
        await self.inner.configure(key, before.model_copy(update={"version": confirmed.version}))
        return confirmed


class ForgetsTheOtherConnection(FacadeControl):
    """Defect: closing one of several subscriptions of a worker removes the worker from the list."""

    async def workers(self) -> tuple[WorkerInfo, ...]:
        closed = {s.consumer for s in self.facade.subscriptions if s.inner.closed}
        return tuple(w for w in await self.inner.workers() if w.worker_id not in closed)


class RewritesAnswers(FacadeControl):
    """Defect: after a cancel, an earlier settlement that is sent again gets another answer than before."""

    async def cancel(self, key: str, task_id: str) -> bool:
        cancelled: bool = await self.inner.cancel(key, task_id)
        record = self.facade.inner._store.find(key, task_id)
        if cancelled and record is not None and record.last is not None:
            record.last = (*record.last[:2], Settled.LEASE_LOST)
        return cancelled


class NoHistory(FacadeDeadLetters):
    """Defect: dead letters have no history."""

    async def list(self, key: str, **page: Any) -> tuple[DeadLetter, ...]:
        letters = await self.inner.list(key, **page)
        return tuple(msgspec.structs.replace(letter, history=()) for letter in letters)


class RedriveLoses(FacadeDeadLetters):
    """Defect: redriving a task removes it."""

    async def redrive(self, key: str, *task_ids: str) -> int:
        moved: int = await self.inner.discard(key, *task_ids)
        return moved


class Overstating(Facade):
    """Defect: a backend that declares itself durable, although its tasks do not survive reopening."""

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities of the memory backend plus durability."""
        return msgspec.structs.replace(self.inner.capabilities, durable=True)
