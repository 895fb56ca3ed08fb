# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Backends that each break one promise about unique keys, replacements or debounces."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from taskqueue_core.capabilities import Maintained
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, State, Task
from tests.conformance.broken_limits import queue_of
from tests.conformance.facade import FacadeControl, FacadeDeadLetters, FacadePublisher


class Changes(FacadePublisher):
    """A publisher that publishes other tasks than it was given."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers: list[Confirmation] = []
        for task in tasks:
            answers += await self.inner.publish(self.other(task))
        return tuple(answers)

    def other(self, task: Task) -> Task:
        """Return the task that is published instead."""
        return task if task.unique is None else structs.replace(task, unique=self.key(task.unique))

    def key(self, unique: Any) -> Any:
        """Return the unique key that is used instead."""
        return unique


class Answers(FacadePublisher):
    """A publisher that answers something else."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return tuple([self.answer(each) for each in await self.inner.publish(*tasks)])

    def answer(self, answer: Confirmation) -> Confirmation:
        """Return another answer."""
        return answer


class First(FacadePublisher):
    """A publisher that decides about some tasks before the store does."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        answers: list[Confirmation] = []
        for task in tasks:
            decided = self.decide(task) if task.unique is not None else None
            answers += [decided] if decided else await self.inner.publish(task)
        return tuple(answers)

    def decide(self, task: Task) -> Confirmation | None:
        """Return an answer, or ``None`` to let the store decide."""


def sharing(part: FacadePublisher, task: Task, *, everywhere: bool = False) -> list[Any]:
    """Return the records whose tasks have the same unique key, in the same queue or in all."""
    store = part.facade.inner._store
    queues = store.queues.values() if everywhere else [store.known(task.key)]
    return [
        record
        for queue in queues
        for record in queue.records.values()
        if record.task.unique
        and task.unique
        and record.task.unique.key == task.unique.key
        and record.replaced is None
    ]


def kept(task: Task, record: Any) -> Confirmation:
    """Return the answer that ``record`` keeps a task out."""
    return Confirmation(
        key=task.key, task_id=task.id, status=Published.DUPLICATE, existing_id=record.task.id
    )


class KeepsNothingOut(Changes):
    """Defect: unique keys have no effect."""

    def key(self, unique: Any) -> Any:  # noqa: ARG002 - the defect ignores it
        return None


class LooksOncePerBatch(FacadePublisher):
    """Defect: only the first task of a batch is compared with others, as by a bulk insert."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await self.inner.publish(
            *tasks[:1], *(structs.replace(t, unique=None) for t in tasks[1:])
        )


class HidesTheHolder(Answers):
    """Defect: the answer does not name the task that holds the key."""

    def answer(self, answer: Confirmation) -> Confirmation:
        return structs.replace(answer, existing_id=None)


class HoldsUntilTheDelivery(Changes):
    """Defect: a task gives its key back when it is delivered, whatever was asked for."""

    def key(self, unique: Any) -> Any:
        return structs.replace(unique, until="started")


class HoldsUntilTheEnd(Changes):
    """Defect: a task gives its key back at its end, whatever was asked for."""

    def key(self, unique: Any) -> Any:
        return structs.replace(unique, until="ended")


class LetsTheDeadHold(First):
    """Defect: a dead letter holds its key."""

    def decide(self, task: Task) -> Confirmation | None:
        dead = [r for r in sharing(self, task) if r.state is State.DEAD]
        return kept(task, dead[0]) if dead else None


class LetsTheEndedHold(First):
    """Defect: a cancelled or expired task holds its key."""

    def decide(self, task: Task) -> Confirmation | None:
        over = (State.CANCELLED, State.EXPIRED)
        ended = [r for r in sharing(self, task) if r.state in over]
        return kept(task, ended[0]) if ended else None


class SharesOverQueues(First):
    """Defect: a task keeps out those of other queues."""

    def decide(self, task: Task) -> Confirmation | None:
        live = [
            r for r in sharing(self, task, everywhere=True) if r.live and r.task.key != task.key
        ]
        return kept(task, live[0]) if live else None


class LooksForTheKeyFirst(First):
    """Defect: the key is looked up before the id."""

    def decide(self, task: Task) -> Confirmation | None:
        live = [r for r in sharing(self, task) if r.live and r.task.id != task.id]
        known = task.id in queue_of(self.facade, task.key).records
        return kept(task, live[0]) if live and known else None


class KeepsInsteadOfRefusing(Changes):
    """Defect: a publish that asked to be refused is kept out in silence."""

    def key(self, unique: Any) -> Any:
        how = "keep" if unique.on_conflict == "refuse" else unique.on_conflict
        return structs.replace(unique, on_conflict=how)


class SuggestsARetry(Answers):
    """Defect: the refusal of a task that is not unique suggests to try again."""

    def answer(self, answer: Confirmation) -> Confirmation:
        if answer.code is not Refusal.NOT_UNIQUE:
            return answer
        return structs.replace(answer, retry_after=1.0)


class RefusesWithoutAReason(Answers):
    """Defect: the refusal of a task that is not unique has no reason."""

    def answer(self, answer: Confirmation) -> Confirmation:
        return structs.replace(answer, reason=None)


class RefusesForLackOfRoom(First):
    """Defect: a full queue refuses a task before its key is looked up."""

    def decide(self, task: Task) -> Confirmation | None:
        queue = queue_of(self.facade, task.key)
        capacity = queue.settings.capacity
        if task.id in queue.records or capacity is None or queue.fresh < capacity:
            return None
        return Confirmation(
            key=task.key, task_id=task.id, status=Published.REFUSED, code=Refusal.QUEUE_FULL,
            reason="full", retry_after=1.0,
        )  # fmt: skip


class HasNoPeriod(Changes):
    """Defect: a period has no effect."""

    def key(self, unique: Any) -> Any:
        return structs.replace(unique, period=None)


class HoldsForEver(Changes):
    """Defect: a period does not end."""

    def key(self, unique: Any) -> Any:
        return structs.replace(unique, period=unique.period and 1000 * unique.period)


class ForgetsThePeriod(FacadeControl):
    """Defect: a period ends when the record of its task would be deleted."""

    async def maintain(self) -> Maintained:
        store = self.facade.inner._store
        for queue in store.queues.values():
            for record in list(queue.records.values()):
                if (
                    record.ended
                    and store.clock.now() >= record.updated_at + queue.settings.dedupe_window
                ):
                    queue.unique.remove(record)
        return await self.inner.maintain()


class RedrivesWithoutAKey(FacadeDeadLetters):
    """Defect: a redriven task does not hold its key."""

    async def redrive(self, key: str, *task_ids: str) -> int:
        queue = self.facade.inner._store.known(key)
        dead = list(queue.dead.values())
        moved = await self.inner.redrive(key, *task_ids)
        for record in dead:
            queue.unique.remove(record)
        return moved


class RedriveMeetsTheKey(FacadeDeadLetters):
    """Defect: a redrive is kept out by a newer holder."""

    async def redrive(self, key: str, *task_ids: str) -> int:
        queue, now = self.facade.inner._store.known(key), self.facade.now()
        free = [
            name
            for name, record in queue.dead.items()
            if record.task.unique is None or not queue.unique.holders(record.task.unique.key, now)
        ]
        return await self.inner.redrive(key, *free) if free and not task_ids else 0


class RetryMeetsItsKey(FacadePublisher):
    """Defect: a retry is kept out by the key of its own task."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        settles: Delivery | None = options.get("settles")
        if task.unique is not None and settles is not None:
            return Confirmation(key=task.key, task_id=task.id, status=Published.DUPLICATE)
        return await self.inner.schedule_retry(task, at, **options)


class OneHolderStopsAll(First):
    """Defect: with fan-out, a holder in one queue keeps the copies for the others out."""

    def decide(self, task: Task) -> Confirmation | None:
        bound = queue_of(self.facade, task.key).settings.bound_to
        live = [r for key in bound for r in sharing(self, structs.replace(task, key=key)) if r.live]
        return kept(task, live[0]) if live else None


CASES: tuple[tuple[type, str, str | None], ...] = (
    (KeepsNothingOut, "test_unique_keeps_a_second_task_out", "7"),
    (LooksOncePerBatch, "test_unique_within_a_batch", "7"),
    (HidesTheHolder, "test_unique_keeps_a_second_task_out", "7"),
    (SharesOverQueues, "test_unique_keeps_a_second_task_out", "7"),
    (HoldsUntilTheDelivery, "test_unique_held_until_the_end", None),
    (HoldsUntilTheEnd, "test_unique_until_started", None),
    (LetsTheDeadHold, "test_unique_dead_letter_holds_nothing", None),
    (LetsTheEndedHold, "test_unique_every_end_gives_the_key_back", None),
    (LooksForTheKeyFirst, "test_unique_id_comes_first", "7"),
    (KeepsInsteadOfRefusing, "test_unique_refuses_a_second_task", "6"),
    (SuggestsARetry, "test_unique_refuses_a_second_task", "6"),
    (RefusesWithoutAReason, "test_unique_refuses_a_second_task", "6"),
    (RefusesForLackOfRoom, "test_unique_takes_no_room", "6"),
    (HasNoPeriod, "test_unique_period", None),
    (HoldsForEver, "test_unique_period", None),
    (ForgetsThePeriod, "test_unique_period_longer_than_the_memory", "7"),
    (RedrivesWithoutAKey, "test_unique_redriven_task_takes_the_key_back", None),
    (RedriveMeetsTheKey, "test_unique_redriven_task_takes_the_key_back", None),
    (RetryMeetsItsKey, "test_unique_retry_never_meets_its_key", "7"),
    (OneHolderStopsAll, "test_unique_each_queue_of_a_fan_out_decides", None),
)
"""each defect, the test of the kit that must fail, and a law that its docstring names"""
